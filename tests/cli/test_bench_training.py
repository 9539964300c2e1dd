"""`rmsnorm bench --model --train`: a training step, its time and its memory, on a model's own norms and on ours."""

import importlib.util
import json
import os

import pytest
import torch

from rmsnorm.cli import main
from rmsnorm.cli.bench import training
from rmsnorm.cli.bench.model import PatchedModel
from rmsnorm.patching.replacing import is_patched

pytestmark = pytest.mark.demo
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
QUICK = ["--train", "--rounds", "1", "--threads", "1", "--prefill", "16"]


@pytest.fixture
def config(tmp_path):
    if not importlib.util.find_spec("transformers") and not os.environ.get("CI"):
        pytest.skip("transformers is not installed; `make demo` installs it")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 99, **SIZES}))
    return str(tmp_path)


def test_the_peak_is_the_most_that_is_there_at_a_time():
    def one_after_another():
        for _ in range(3):
            torch.empty(1 << 20)

    def together():
        return [torch.empty(1 << 20) for _ in range(3)]

    assert training.peak_memory(one_after_another) == 4 << 20
    assert training.peak_memory(together) == 12 << 20
    before = torch.empty(1 << 20)
    assert training.peak_memory(lambda: before.neg().neg()) == 8 << 20


def test_steps_in_every_precision_with_and_without_checkpointing(config, capsys):
    assert main(["bench", "--model", config, *QUICK, "--json"]) == 0
    about, *found = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert "about" in about
    assert [(line["precision"], line["checkpointing"], line["norms_are"]) for line in found] == [
        (precision, checkpointing, which)
        for precision in ("float32", "bfloat16", "autocast")
        for checkpointing in (False, True)
        for which in ("before", "after")
    ]
    assert all(line["phase"] == "training" and line["peak"] > 0 and line["whole"]["median"] > 0 for line in found)
    peak = {(line["precision"], line["checkpointing"], line["norms_are"]): line["peak"] for line in found}
    for which in ("before", "after"):
        assert peak["bfloat16", False, which] < peak["float32", False, which]


def test_the_tables_are_at_most_80_columns_wide(config, capsys):
    assert main(["bench", "--model", config, *QUICK, "--dtypes", "autocast"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("own norms") == text.count("ours") == 2
    assert "autocast, 1 thread, activation checkpointing" in " ".join(text.split())


def test_every_way_runs_on_its_norms_and_learns_nothing(config, monkeypatch):
    """Compiled too, without a compiler: the graph as Dynamo takes it."""
    language = PatchedModel(config)
    language.use_dtype(torch.float32)
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **options: compiled(model, backend="eager", **options))
    weights = {name: p.detach().clone() for name, p in language.model.named_parameters()}
    ids = torch.arange(16)[None]
    steps = training._Steps(language, ids, "float32", False)
    for which, way in (("before", False), ("after", True), ("before", True), ("after", False)):
        steps._one(which, way)
        assert {is_patched(norm) for norm in language.norms[which].values()} == {which == "after"}
        assert all(p.grad is not None for p in language.model.parameters())
    assert all(torch.equal(p, weights[name]) for name, p in language.model.named_parameters())
    found = steps.race([("before", True), ("after", True)], 1, lambda *said: None)
    assert set(found) == {("before", True), ("after", True)}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--train"], "--train is for --model"),
        (["--compile"], "--compile is for --train"),
        (["--model", "--train", "--decode", "3"], "--decode and --train"),
        (["--dtypes", "autocast"], "with --train alone"),
        (["--model", "--train", "--dtypes", "float16"], "--train takes --dtypes of float32, bfloat16, autocast"),
    ],
)
def test_what_would_be_ignored_is_refused(arguments, said, capsys):
    assert main(["bench", *arguments]) == 2
    assert said in capsys.readouterr().err
