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
    assert "1 norm examined, nothing looks wrong." in out
    _, norms = found(capsys, target)
    assert norms["1"]["width"] == 8
    assert norms["1"]["convention"] == "weight, once"
    assert norms["1"]["eps"] == 1e-5
    assert norms["1"]["low"] < 1 < norms["1"]["high"]


def test_one_layer_of_small_gains_among_others_is_no_finding(capsys, module):
    layers = nn.Sequential(*(trained(nn.RMSNorm(64), mean) for mean in (0, 1, 1)))
    assert found(capsys, f"{module(build=lambda: layers)}:build")[0] == 0


def test_weights_that_are_not_finite(capsys, module):
    norm = trained(nn.RMSNorm(64), 1)
    norm.weight.data[3] = torch.nan
    code, norms = found(capsys, f"{module(build=lambda: nn.Sequential(norm))}:build")
    assert code == 1
    assert norms["0"]["warnings"] == ["1 of 64 weights are not finite"]


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


def test_a_layer_norm_in_a_file_is_known_by_its_bias(capsys, tmp_path):
    tensors = {name: torch.randn(8) for name in ("a_norm.weight", "ln.weight", "ln.bias")}
    _, norms = found(capsys, safetensors(tmp_path / "model.safetensors", tensors))
    assert list(norms) == ["a_norm.weight"]


def refused(capsys, target):
    """The one line in which a target is refused, with exit code 2."""
    assert main(["inspect", str(target)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    (line,) = [line for line in captured.err.splitlines() if line.startswith("rmsnorm inspect:")]
    return line


def headed(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(**changed):
    return {"norm.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changed}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\1\2",
        struct.pack("<Q", 2**40) + b"{}",
        struct.pack("<Q", 2**64 - 1) + b"{}",
        headed(b"{no}"),
        headed(b"\xff\xfe{}"),
        headed(b"[" * 100_000),
        headed([1, 2]),
        headed({"norm.weight": 3}),
        headed({"norm.weight": {"dtype": "F32"}}),
        headed(entry(dtype=32), bytes(8)),
        headed(entry(dtype="F31"), bytes(8)),
        headed(entry(shape=["2"]), bytes(8)),
        headed(entry(shape=[-2]), bytes(8)),
        headed(entry(shape=[2**40, 2**40]), bytes(8)),
        headed(entry(shape=[10**30]), bytes(8)),
        headed(entry(data_offsets=[0]), bytes(8)),
        headed(entry(data_offsets=[8, 0]), bytes(8)),
        headed(entry(data_offsets=[-8, 0]), bytes(8)),
        headed(entry(data_offsets=[0, 8.0]), bytes(8)),
        headed(entry(data_offsets=[0, 2**62]), bytes(8)),
        headed(entry(data_offsets=[2**63, 2**63 + 8]), bytes(8)),
        headed(json.dumps(entry(data_offsets=[0, float("inf")])).encode(), bytes(8)),
        headed(b'{"\\ud800.norm.weight":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
        headed({**entry(), "__metadata__": {"format": [1]}}, bytes(8)),
        headed(entry(), bytes(4)),
        headed(entry(), bytes(12)),
        headed(entry(shape=[3]), bytes(8)),
    ],
)
def test_a_file_that_is_no_safetensors_file(capsys, tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    line = refused(capsys, path)
    assert "no sound .safetensors file" in line
    assert str(path) in line


@pytest.mark.parametrize("target", ["nowhere", "nowhere:build", "pyproject.toml", ":build", "nowhere:", "json:nothing"])
def test_a_target_that_is_none_is_named(capsys, target):
    assert target in refused(capsys, target)


def test_an_empty_folder_and_a_folder_called_like_a_file(capsys, tmp_path):
    folder = tmp_path / "model.safetensors"
    folder.mkdir()
    assert "has neither config.json nor .safetensors files" in refused(capsys, folder)


def test_a_callable_that_returns_no_model(capsys, module):
    assert "returns int" in refused(capsys, f"{module(build=lambda: 3)}:build")


def test_a_callable_that_fails_says_what_and_where(capsys, module, tmp_path, monkeypatch):
    assert "fails: ZeroDivisionError: division by zero" in refused(capsys, f"{module(build=lambda: 1 / 0)}:build")
    assert "fails: TypeError" in refused(capsys, f"{module(build=lambda size: size)}:build")
    (tmp_path / "broken_for_inspect.py").write_text("import torch\nraise RuntimeError('not today\\nor ever')\n")
    monkeypatch.syspath_prepend(tmp_path)
    line = refused(capsys, "broken_for_inspect:build")
    assert "cannot be imported: RuntimeError: not today (" in line
    assert line.endswith("broken_for_inspect.py:2)")


def test_a_callable_that_ends_the_process_or_prints(capsys, module):
    def leaves():
        raise SystemExit(0)

    class Leaves(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x):
            raise SystemExit(0)

    def prints():
        print("{")
        return nn.Sequential(trained(nn.RMSNorm(8), 1))

    assert "SystemExit" in refused(capsys, f"{module(build=leaves)}:build")
    assert "SystemExit" in refused(capsys, f"{module(build=Leaves)}:build")
    assert found(capsys, f"{module(build=prints)}:build")[0] == 0


@pytest.mark.parametrize("eps", [-1e-5, float("nan"), float("inf")])
def test_an_impossible_eps_of_a_module_is_a_finding(capsys, module, eps):
    norms = nn.Sequential(trained(nn.RMSNorm(8), 1), trained(nn.RMSNorm(8, eps=eps), 1))
    code, listed = found(capsys, f"{module(build=lambda: norms)}:build")
    assert code == 1
    assert [listed[name]["warnings"] for name in "01"] == [[], [f"eps is {eps:g}: no norm can have that"]]


def test_a_model_without_norms(capsys, module):
    code, out = inspect(capsys, f"{module(build=lambda: nn.Linear(2, 2))}:build")
    assert (code, out.splitlines()[-1]) == (0, "No RMSNorm found.")


def shards(path, *named, index=True):
    for i, name in enumerate(named):
        safetensors(path / name, {f"layers.{i}.norm.weight": 1 + 0.1 * torch.randn(8)})
    if index:
        weight_map = {f"layers.{i}.norm.weight": name for i, name in enumerate(named)}
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


TWO = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.mark.parametrize("index", [True, False], ids=["with an index", "without"])
def test_a_checkpoint_in_shards(capsys, tmp_path, index):
    code, norms = found(capsys, shards(tmp_path, *TWO, index=index))
    assert (code, list(norms)) == (0, ["layers.0.norm.weight", "layers.1.norm.weight"])
    (tmp_path / TWO[0]).unlink()
    line = refused(capsys, tmp_path)
    assert "is not complete" in line
    assert TWO[0] in line


@pytest.mark.parametrize(
    ("content", "message"),
    [("[]", "must hold a JSON object, got list"), ("{", "cannot be read as JSON"), ("{}", "has no weight_map")],
)
def test_an_index_that_is_none(capsys, tmp_path, content, message):
    shards(tmp_path, *TWO)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert message in refused(capsys, tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1]", "must hold a JSON object, got list"),
        (b"{", "cannot be read as JSON"),
        (b"\xff", "cannot be read as JSON"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b'{"rms_norm_eps": "small"}', "rms_norm_eps in the configuration must be a number, got 'small'"),
        (b'{"text_config": {"rms_norm_eps": [1]}}', "must be a number, got [1]"),
    ],
)
def test_a_configuration_that_is_none(capsys, tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    assert message in refused(capsys, path)


def test_json_has_this_form_and_is_json_whatever_the_weights(capsys, module):
    norms = nn.Sequential(trained(nn.RMSNorm(8, eps=1e-5), 1), nn.RMSNorm(4, elementwise_affine=False), nn.RMSNorm(2))
    norms[2].weight.data.fill_(torch.nan)
    target = f"{module(build=lambda: norms)}:build"
    code, out = inspect(capsys, target, "--json")

    def no_constant(name):
        raise AssertionError(f"{name} is no JSON")

    report = json.loads(out, parse_constant=no_constant)
    assert code == 1
    assert list(report) == ["source", "warnings", "notes", "norms"]
    assert report["source"] == target
    first, plain, bad = report["norms"]
    kinds = {key: type(value) for key, value in first.items()}
    assert kinds == {
        "name": str,
        "width": int,
        "convention": str,
        "eps": float,
        "weight_offset": float,
        "dtype": str,
        "low": float,
        "high": float,
        "median": float,
        "warnings": list,
        "notes": list,
    }
    assert plain.keys() == first.keys()
    assert [plain[key] for key in ("dtype", "low", "median")] == [None, None, None]
    assert [bad["low"], bad["warnings"]] == [None, ["2 of 2 weights are not finite"]]


@pytest.mark.parametrize(
    ("norm", "mean", "warning"),
    [
        (lambda: rmsnorm.RMSNorm(64, weight_offset=1.0), 0.0, None),
        (lambda: rmsnorm.RMSNorm(64, weight_offset=1.0), 1.0, "gains, loaded as if they were offsets"),
        (lambda: nn.RMSNorm(64), 1.0, None),
        (lambda: nn.RMSNorm(64), 0.0, "offsets from one, loaded as if they were gains"),
    ],
)
def test_offsets_and_gains_are_told_apart(capsys, module, norm, mean, warning):
    layers = nn.Sequential(*(trained(norm(), mean) for _ in range(3)))
    code, norms = found(capsys, f"{module(build=lambda: layers)}:build")
    assert code == (warning is not None)
    for found_norm in norms.values():
        assert found_norm["warnings"] == [] if warning is None else warning in found_norm["warnings"][0]


@pytest.mark.parametrize(
    ("eps", "config", "warned"), [(1e-5, 1e-5, 0), (1e-5, "1e-05", 0), (1e-6, 1e-5, 1), (1e-6, None, 0)]
)
def test_eps_beside_the_configurations(capsys, module, eps, config, warned):
    class Config:
        def to_dict(self):
            return {"text_config": {"rms_norm_eps": config}}

    model = nn.Sequential(trained(nn.RMSNorm(8, eps=eps), 1))
    model.config = Config()
    code, norms = found(capsys, f"{module(build=lambda: model)}:build")
    assert (code, len(norms["0"]["warnings"])) == (warned, warned)


@pytest.mark.parametrize(
    ("norm", "warned"),
    [
        (lambda: nn.RMSNorm(64), 1),
        (lambda: rmsnorm.RMSNorm(64, weight_offset=1.0), 1),
        (lambda: trained(nn.RMSNorm(64), 1), 0),
        (lambda: nn.RMSNorm(64, elementwise_affine=False), 0),
    ],
    ids=["ones", "zeros and one", "trained", "no weight"],
)
def test_weights_at_their_initial_value(capsys, module, norm, warned):
    code, norms = found(capsys, f"{module(build=lambda: nn.Sequential(norm()))}:build")
    assert code == warned
    assert ["initial value" in text for text in norms["0"]["warnings"]] == [True] * warned


@pytest.mark.parametrize(
    ("dtype", "offset", "mean", "step"),
    [
        (torch.bfloat16, 0.0, 1.0, "0.00390625 (below) and 0.0078125"),
        (torch.float16, 0.0, 1.0, "0.000488281 (below) and 0.000976562"),
        (torch.float32, 0.0, 1.0, None),
        (torch.bfloat16, 0.0, 5.0, None),
        (torch.bfloat16, 1.0, 0.0, None),
    ],
    ids=["bfloat16", "float16", "float32", "far from 1", "offsets"],
)
def test_16_bit_weights_near_one(capsys, module, dtype, offset, mean, step):
    norm = trained(rmsnorm.RMSNorm(64, weight_offset=offset), mean).to(dtype)
    code, norms = found(capsys, f"{module(build=lambda: nn.Sequential(norm))}:build")
    assert code == 0
    notes = norms["0"]["notes"]
    assert notes == [] if step is None else step in notes[0]
