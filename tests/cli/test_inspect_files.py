"""`rmsnorm inspect` of checkpoints as they are found: which norms it sees, and what it says of those it cannot read."""

import json
import os
import struct

import pytest
import torch

from rmsnorm.cli import main

gguf = pytest.importorskip("gguf")
np = pytest.importorskip("numpy")
transformers = pytest.importorskip("transformers")
from safetensors.torch import save_file  # noqa: E402

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
}


def inspect(capsys, target):
    """The exit code, the norms by name, and the whole report; what refuses has no report."""
    code = main(["inspect", str(target), "--json"])
    said = capsys.readouterr()
    report = json.loads(said.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")) if said.out else None
    norms = {norm["name"]: norm for norm in report["norms"]} if report else said.err
    return code, norms, report


def gains(count=64, mean=1.0, spread=0.1, seed=0):
    return mean + spread * torch.randn(count, generator=torch.Generator().manual_seed(seed))


def checkpoint(folder, config=None, change=None):
    """A folder as transformers itself saves it, its vectors drawn around one; `change` may edit what is saved."""
    made = transformers.AutoConfig.for_model(**(config or LLAMA))
    model = getattr(transformers, (config or LLAMA)["architectures"][0])(made)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            if parameter.dim() == 1:
                parameter.copy_(gains(parameter.numel(), seed=i))
    if change is not None:
        change(model)
    model.save_pretrained(folder)
    return folder


def gguf_file(path, tensors, architecture="llama", eps=1e-5, parts=None, order=gguf.GGUFEndian.LITTLE):
    writer = gguf.GGUFWriter(path, architecture, endianess=order)
    if eps is not None:
        writer.add_layer_norm_rms_eps(eps)
    if parts is not None:
        writer.add_uint16("split.no", parts[0])
        writer.add_uint16("split.count", parts[1])
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def plain(t):
    return t.numpy(), None


LAYERS = [f"blk.{i}.{kind}.weight" for i in range(4) for kind in ("attn_norm", "ffn_norm")]

# Names in the file differ from those in the model for all three.
VISION = [
    {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": {key: value for key, value in LLAMA.items() if key != "architectures"},
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
    },
    {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "vocab_size": 64,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        "mm_tokens_per_image": 4,
    },
]


@pytest.mark.parametrize("config", VISION, ids=lambda config: config["model_type"])
def test_every_norm_of_a_vision_language_checkpoint_is_read_under_its_own_name(capsys, tmp_path, config):
    def poison(model):
        (norm,) = (m for name, m in model.named_modules() if name.endswith("layers.0.input_layernorm"))
        norm.weight.data[3] = torch.nan

    code, norms, _ = inspect(capsys, checkpoint(tmp_path, config, poison))
    assert code == 1
    assert all(norm["dtype"] == "float32" for norm in norms.values())
    (bad,) = (norm for name, norm in norms.items() if name.endswith("layers.0.input_layernorm"))
    assert bad["convention"] is not None
    assert "1 of 32 weights are not finite" in bad["warnings"]


def test_a_norm_that_the_checkpoint_lacks_and_one_that_the_model_lacks(capsys, tmp_path):
    checkpoint(tmp_path, {**LLAMA, "num_hidden_layers": 3})
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    code, norms, _ = inspect(capsys, tmp_path)
    assert code == 0
    assert norms["model.layers.2.input_layernorm.weight"]["notes"] == ["the model has nothing of this name"]
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 4}))
    code, _, report = inspect(capsys, tmp_path)
    assert code == 1
    assert "2 of the model's norms have no weight in it" in report["warnings"][0]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float64, torch.float16])
@pytest.mark.parametrize("shape", [(64,), (4, 16), (2, 2, 16)], ids=str)
def test_weights_of_any_float_and_any_dimensions_are_examined(capsys, tmp_path, dtype, shape):
    bad = gains().reshape(shape).clone()
    bad[(0,) * len(shape)] = torch.nan
    tensors = {
        "layers.0.self_attn.q_norm.weight": gains().reshape(shape).to(dtype),
        "layers.1.self_attn.q_norm.weight": bad.to(dtype),
        "layers.0.norm_proj.weight": torch.zeros(8, 8),
        "layers.0.norm1.linear.weight": torch.zeros(8, 8),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    code, norms, _ = inspect(capsys, tmp_path / "model.safetensors")
    assert code == 1
    assert list(norms) == list(tensors)[:2]
    first, second = norms.values()
    assert (first["dtype"], first["warnings"]) == (str(dtype).removeprefix("torch."), [])
    assert second["warnings"] == ["1 of 64 weights are not finite"]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.bool, torch.complex64])
def test_weights_that_say_nothing_by_themselves_are_named_as_unread(capsys, tmp_path, dtype):
    tensors = {"a.norm.weight": torch.ones(8, dtype=dtype), "a.norm.weight_scale": torch.ones(1)}
    save_file({**tensors, "b.norm.weight": gains()}, tmp_path / "model.safetensors")
    code, norms, _ = inspect(capsys, tmp_path / "model.safetensors")
    assert code == 1
    assert list(norms) == ["a.norm.weight", "b.norm.weight"]
    assert norms["a.norm.weight"]["dtype"] == str(dtype).removeprefix("torch.")
    assert "not examined" in norms["a.norm.weight"]["warnings"][0]


def test_what_stands_beside_weights_is_no_norm(capsys, tmp_path):
    names = ("bias", "running_mean", "running_var", "weight.exp_avg", "weight.exp_avg_sq", "weight.absmax")
    tensors = {f"layers.0.norm.{name}": gains() for name in names}
    tensors |= {"bn.norm.weight": gains(), "bn.norm.running_mean": gains(), "q_norm.lora_A.weight": torch.ones(4, 8)}
    save_file(tensors, tmp_path / "optimizer.safetensors")
    code, norms, report = inspect(capsys, tmp_path / "optimizer.safetensors")
    assert (code, norms) == (0, {})
    assert "None of its" in report["notes"][-1]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "BF16", "F16"])
def test_gguf_types_are_decoded(capsys, tmp_path, kind):
    kind = gguf.GGMLQuantizationType[kind]
    sound, bad = (gguf.quantize(gains().numpy(), kind) for _ in range(2))
    # The first two bytes are a number of 16 bits in all of them: the first element, or the scale of the first block.
    bad.view(np.uint8).reshape(-1)[:2] = (0xFF, 0x7F)
    tensors = {"blk.0.attn_norm.weight": (sound, kind), "blk.1.attn_norm.weight": (bad, kind)}
    code, norms, _ = inspect(capsys, gguf_file(tmp_path / "model.gguf", tensors))
    first, second = norms.values()
    assert code == 1
    assert first["warnings"] == []
    assert abs(first["median"] - 1) < 0.1  # the gains' deviation; Q4_0 has steps of a tenth of it
    assert "not finite" in second["warnings"][0]


def test_gguf_of_the_other_byte_order(capsys, tmp_path):
    tensors = {"blk.0.attn_norm.weight": plain(gains()), "blk.0.ffn_norm.weight": plain(gains().half())}
    path = gguf_file(tmp_path / "model.gguf", tensors, order=gguf.GGUFEndian.BIG)
    code, norms, _ = inspect(capsys, path)
    assert code == 0
    assert norms["blk.0.attn_norm.weight"]["low"] == float(gains().min())
    assert norms["blk.0.ffn_norm.weight"]["high"] == float(gains().half().max())


def test_the_parts_of_a_split_gguf_are_read_together(capsys, tmp_path):
    first, second, third = (tmp_path / f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3))
    gguf_file(first, {}, parts=(0, 3))
    gguf_file(second, {"blk.0.attn_norm.weight": plain(gains())}, eps=None, parts=(1, 3))
    gguf_file(third, {"blk.1.attn_norm.weight": plain(gains())}, eps=None, parts=(2, 3))
    for target in (first, third, tmp_path):
        code, norms, _ = inspect(capsys, target)
        assert (code, len(norms)) == (0, 2)
        assert {norm["eps"] for norm in norms.values()} == {float(np.float32(1e-5))}
    first.unlink()
    code, norms, report = inspect(capsys, third)
    assert (code, len(norms)) == (1, 2)
    assert f"{first.name} is missing" in report["warnings"][0]
    renamed = third.rename(tmp_path / "renamed.gguf")
    code, norms, report = inspect(capsys, renamed)
    assert (code, len(norms)) == (1, 1)
    assert "one part of 3" in report["warnings"][0]


@pytest.mark.parametrize("architecture", ["gemma", "gemma3", "qwen3next"])
@pytest.mark.parametrize(("mean", "spread", "warned"), [(1, 0.3, False), (2, 0.3, True), (2, 0.0, True), (4, 2, False)])
def test_one_added_twice_to_the_offsets_of_a_gguf(capsys, tmp_path, architecture, mean, spread, warned):
    tensors = {name: plain(gains(256, mean, spread, seed=i)) for i, name in enumerate(LAYERS)}
    code, norms, _ = inspect(capsys, gguf_file(tmp_path / "model.gguf", tensors, architecture))
    assert code == warned
    assert all(any("added twice" in text for text in norm["warnings"]) == warned for norm in norms.values())


def test_gains_near_two_of_a_family_without_offsets_are_no_finding(capsys, tmp_path):
    tensors = {name: plain(gains(256, 2, 0.3, seed=i)) for i, name in enumerate(LAYERS)}
    assert inspect(capsys, gguf_file(tmp_path / "model.gguf", tensors, "llama"))[0] == 0


@pytest.mark.parametrize("eps", [-1e-6, float("nan"), float("inf"), float("-inf"), 1e5])
def test_an_impossible_eps_is_a_finding(capsys, tmp_path, eps):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "rms_norm_eps": eps}))
    code, norms, report = inspect(capsys, path)
    assert code == 1
    assert "rms_norm_eps: eps is" in report["warnings"][0]
    assert len(norms) == 5
    assert all("eps is" in norm["warnings"][0] for norm in norms.values())
    code, norms, _ = inspect(
        capsys, gguf_file(tmp_path / "m.gguf", {"output_norm.weight": plain(gains())}, eps=np.float32(eps))
    )
    assert code == 1


def test_an_eps_that_the_model_does_not_take_from_its_configuration(capsys, tmp_path):
    path = tmp_path / "config.json"
    sound = {key: value for key, value in LLAMA.items() if key != "rms_norm_eps"}
    path.write_text(json.dumps({**sound, "norm_eps": 3e-4}))  # Mistral's own name for it: transformers ignores it
    code, norms, _ = inspect(capsys, path)
    assert code == 1
    assert norms["model.norm"]["warnings"] == ["eps is 1e-06, not the configuration's 0.0003"]


@pytest.mark.parametrize("model_type", ["qwen3", "gemma2", "t5", "mamba2", "pixtral"])
def test_default_configurations_are_sound(capsys, tmp_path, model_type):
    config = transformers.AutoConfig.for_model(model_type)
    small = {"num_hidden_layers": 2, "num_layers": 2}
    for name, value in small.items():
        if hasattr(config, name) and getattr(config, "layer_types", None) is None:
            setattr(config, name, value)
    config.save_pretrained(tmp_path)
    code, _, report = inspect(capsys, tmp_path / "config.json")
    assert (code, report["warnings"]) == (0, [])


@pytest.mark.parametrize(
    "name",
    [
        "DataCollatorWithPadding",
        "StoppingCriteriaList",
        "pipeline",
        "AutoModel",
        "logging",
        "__doc__",
        "",
    ],
)
def test_architectures_calls_nothing_but_models(capsys, tmp_path, monkeypatch, name):
    made = getattr(transformers, name, None)
    if isinstance(made, type):
        monkeypatch.setattr(made, "__init__", lambda *_, **__: pytest.fail(f"{name} was called"))
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "architectures": [name]}))
    code, norms, _ = inspect(capsys, path)
    assert (code, len(norms)) == (0, 5)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000"),
        ({"num_labels": 10**9}, "num_labels = 1000000000"),
        ({"num_hidden_layers": 99}, "more than 300 modules"),
        ({"hidden_size": 2**30, "head_dim": 16}, "a norm of 1073741824 elements"),
    ],
    ids=str,
)
def test_a_configuration_of_a_model_that_cannot_be(capsys, tmp_path, monkeypatch, changed, said):
    monkeypatch.setattr("rmsnorm.cli.inspect.building.MOST_MODULES", 300)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, **changed}))
    code, message, _ = inspect(capsys, path)
    assert code == 2
    assert said in message


def test_nothing_is_opened_that_does_not_end(capsys, tmp_path):
    pipe = tmp_path / "pipe.safetensors"
    os.mkfifo(pipe)
    folder = tmp_path / "folder"
    folder.mkdir()
    os.mkfifo(folder / "config.json")
    for target in (pipe, tmp_path, folder):
        code, said, _ = inspect(capsys, target)
        assert code == 2
        assert "file" in said
    device = tmp_path / "zeros.gguf"
    device.symlink_to("/dev/zero")
    assert inspect(capsys, device)[0] == 2
    pipe.unlink()
    save_file({"a.norm.weight": gains()}, folder / "model.safetensors")
    code, norms, report = inspect(capsys, folder)
    assert (code, list(norms)) == (0, ["a.norm.weight"])
    assert report["notes"] == ["config.json is no regular file: conventions are unknown."]


def test_a_file_of_terabytes_takes_no_memory(capsys, tmp_path):
    count = 2**36
    header = json.dumps({"a.norm.weight": {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}}).encode()
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 4 * count)
    code, norms, _ = inspect(capsys, path)
    assert code == 1
    assert "more than any norm has" in norms["a.norm.weight"]["warnings"][0]


@pytest.mark.parametrize(
    ("kind", "value"),
    [("string", "1e-5"), ("bool", True), ("array", [1e-5])],
)
def test_an_eps_of_a_gguf_that_is_no_number(capsys, tmp_path, kind, value):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    getattr(writer, f"add_{kind}")("llama.attention.layer_norm_rms_epsilon", value)
    writer.add_tensor("output_norm.weight", gains().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    code, said, _ = inspect(capsys, tmp_path / "model.gguf")
    assert code == 2 if kind != "array" else said["output_norm.weight"]["eps"] is None


def test_an_index_that_lies(capsys, tmp_path):
    save_file({"a.norm.weight": gains()}, tmp_path / "x.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a.norm.weight": "x.safetensors", "b.weight": "x.safetensors"}}))
    code, _, report = inspect(capsys, tmp_path)
    assert code == 1
    assert report["warnings"] == ["the index has b.weight in x.safetensors, which has no such tensor"]
    index.write_text(json.dumps({"weight_map": {"a.norm.weight": "../outside.safetensors"}}))
    code, said, _ = inspect(capsys, tmp_path)
    assert (code, "not complete" in said) == (2, True)
    index.write_text(json.dumps({"weight_map": {"a.norm.weight": ["x.safetensors"]}}))
    assert inspect(capsys, tmp_path)[0] == 2


NAMES = [
    "\x1b[2Jnorm.weight",
    "a.norm.weight\n5 norms examined, nothing looks wrong.",
    "\u202eb.norm.weight",
    "\x9b3m.norm.weight",
]


def test_names_out_of_files_do_nothing_to_a_terminal(capsys, tmp_path):
    save_file({name: gains() for name in NAMES}, tmp_path / "model.safetensors")
    assert main(["inspect", str(tmp_path / "model.safetensors")]) == 0
    out = capsys.readouterr().out
    assert not {"\x1b", "\x9b", "\u202e"} & set(out)
    assert sum(line.startswith("5 norms") for line in out.splitlines()) == 0
    assert out.splitlines()[-1].startswith("4 norms examined")
    assert list(inspect(capsys, tmp_path / "model.safetensors")[1]) == sorted(NAMES)


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_the_table_fits_the_terminal_and_has_a_line_for_layers_that_look_alike(capsys, tmp_path, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    names = [f"model.layers.{i}.a_block_with_a_long_name.post_attention_layernorm.weight" for i in range(12)]
    tensors = {name: gains(seed=i) for i, name in enumerate(names)}
    tensors[names[10]][0] = torch.inf
    save_file({**tensors, "model.norm.weight": gains()}, tmp_path / "model.safetensors")
    assert main(["inspect", str(tmp_path / "model.safetensors")]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if str(tmp_path) not in line]
    assert max(map(len, lines)) <= columns
    starts = [line for line in lines if line.startswith("model.")]
    assert [line.split()[0].split(".")[2] for line in starts[:2]] == ["0-9,11", "10"]
    assert len(starts) == 3


def test_nothing_looks_wrong_only_where_something_was_examined(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert main(["inspect", str(tmp_path / "config.json")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "5 norms; there are no weights to examine."
