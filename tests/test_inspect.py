"""`rmsnorm inspect`: what it reads, and what it warns of."""

import json
import struct
import sys

import pytest
import torch
from torch import nn

import rmsnorm
from rmsnorm.cli import main

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


@pytest.fixture
def module(tmp_path, monkeypatch):
    """`module(**models)`: the name of a module from which they can be imported as functions."""

    def write(**models):
        monkeypatch.setitem(sys.modules, "made_for_inspect", type("Module", (), models))
        return "made_for_inspect"

    return write


def safetensors(path, tensors):
    header, data = {}, b""
    for name, t in tensors.items():
        raw = bytes(t.contiguous().view(torch.uint8).numpy())
        header[name] = {
            "dtype": NAMES[t.dtype],
            "shape": list(t.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps({**header, "__metadata__": {"format": "pt"}}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def inspect(capsys, *arguments):
    code = main(["inspect", *map(str, arguments)])
    return code, capsys.readouterr().out


def found(capsys, target):
    code, out = inspect(capsys, target, "--json")
    return code, {norm["name"]: norm for norm in json.loads(out)["norms"]}


def trained(norm, mean):
    nn.init.normal_(norm.weight, mean, 0.1, generator=torch.Generator().manual_seed(0))
    return norm


def test_norms_of_a_model_with_their_conventions_and_ranges(capsys, module):
    target = f"{module(build=lambda: nn.Sequential(nn.Linear(8, 8), trained(nn.RMSNorm(8, eps=1e-5), 1)))}:build"
    code, out = inspect(capsys, target)
    assert code == 0
    assert "1 norms, nothing looks wrong" in out
    _, norms = found(capsys, target)
    assert norms["1"]["width"] == 8
    assert norms["1"]["convention"] == "weight, once"
    assert norms["1"]["eps"] == 1e-5
    assert norms["1"]["low"] < 1 < norms["1"]["high"]


def test_gains_in_a_norm_that_adds_one(capsys, module):
    norm = trained(rmsnorm.RMSNorm(64, weight_offset=1.0), 1)
    code, norms = found(capsys, f"{module(build=lambda: nn.Sequential(norm))}:build")
    assert code == 1
    assert "loaded as if they were offsets" in norms["0"]["warnings"][0]


def test_offsets_in_a_norm_that_adds_nothing(capsys, module):
    code, norms = found(capsys, f"{module(build=lambda: nn.Sequential(trained(nn.RMSNorm(64), 0)))}:build")
    assert code == 1
    assert "loaded as if they were gains" in norms["0"]["warnings"][0]


def test_one_layer_of_small_gains_among_others_is_no_finding(capsys, module):
    layers = nn.Sequential(*(trained(nn.RMSNorm(64), mean) for mean in (0, 1, 1)))
    assert found(capsys, f"{module(build=lambda: layers)}:build")[0] == 0


def test_weights_that_were_never_trained_or_loaded(capsys, module):
    code, norms = found(capsys, f"{module(build=lambda: nn.Sequential(nn.RMSNorm(64)))}:build")
    assert code == 1
    assert "initial value" in norms["0"]["warnings"][0]


def test_weights_that_are_not_finite(capsys, module):
    norm = trained(nn.RMSNorm(64), 1)
    norm.weight.data[3] = torch.nan
    code, norms = found(capsys, f"{module(build=lambda: nn.Sequential(norm))}:build")
    assert code == 1
    assert norms["0"]["warnings"] == ["1 of 64 weights are not finite"]


def test_eps_that_is_not_the_configurations(capsys, module):
    class Config:
        def to_dict(self):
            return {"rms_norm_eps": 1e-5}

    model = nn.Sequential(trained(nn.RMSNorm(8, eps=1e-6), 1))
    model.config = Config()
    code, norms = found(capsys, f"{module(build=lambda: model)}:build")
    assert code == 1
    assert norms["0"]["warnings"] == ["eps is 1e-06, not the configuration's 1e-05"]


def test_a_safetensors_file_by_itself(capsys, tmp_path):
    weight = 1 + 0.1 * torch.randn(64)
    tensors = {"layers.0.norm.weight": weight.bfloat16(), "layers.0.mlp.weight": torch.zeros(4, 4), "norm.bias": weight}
    code, norms = found(capsys, safetensors(tmp_path / "model.safetensors", tensors))
    assert code == 0
    assert list(norms) == ["layers.0.norm.weight"]
    norm = norms["layers.0.norm.weight"]
    assert (norm["dtype"], norm["convention"]) == ("bfloat16", None)
    assert norm["low"] == float(weight.bfloat16().min())
    assert "0.00390625" in norm["notes"][0]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "header"), (struct.pack("<Q", 4) + b"{no}", "not JSON"), (struct.pack("<Q", 2**40) + b"{}", "header")],
)
def test_a_file_that_is_none(capsys, tmp_path, content, message):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert main(["inspect", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_cut_short(capsys, tmp_path):
    path = safetensors(tmp_path / "model.safetensors", {"norm.weight": torch.ones(64)})
    path.write_bytes(path.read_bytes()[:-4])
    assert main(["inspect", str(path)]) == 2
    assert "cut short" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["nowhere", "nowhere:build", "pyproject.toml"])
def test_a_target_that_is_none_names_those_that_are_allowed(capsys, target):
    assert main(["inspect", target]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("rmsnorm inspect:")]
    assert target in line


def test_a_callable_that_returns_no_model(capsys, module):
    assert main(["inspect", f"{module(build=lambda: 3)}:build"]) == 2
    assert "returns int" in capsys.readouterr().err
