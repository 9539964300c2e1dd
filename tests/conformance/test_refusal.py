"""A refusal is a clear error about the argument; every other exception is a fault."""

import pytest
import torch

from rmsnorm import conformance
from rmsnorm.cli import main
from rmsnorm.conformance import chosen
from rmsnorm.conformance.outcome import NOT_APPLICABLE, REFUSED
from tests.conformance.faulty import formula
from tests.conformance.suite import NORM, failing, results


def test_what_is_refused_is_not_scored():
    def norm(x, weight, eps=1e-6):
        if x.dtype != torch.float32 or not x.is_contiguous() or x.shape[-1] % 8:
            raise ValueError("contiguous float32 in multiples of 8")
        return formula.right(x, weight, eps)

    found = results(norm)
    assert not failing(found)
    refused = {name for name, r in found.items() if r.verdict == REFUSED}
    assert {"accuracy-bfloat16", "widths", "strides"} <= refused
    assert "contiguous float32" in found["accuracy-bfloat16"].measured


def _breaks(how):
    def norm(x, weight, eps=1e-6):
        if x.dtype != torch.float32 or x.dim() > 3 or not x.is_contiguous() or x.shape[-1] % 8:
            how(x)
        return formula.right(x, weight, eps)

    return norm


def _asserts(x):
    assert x is None


def _raises(error):
    def how(x):
        raise error

    return how


@pytest.mark.parametrize(
    "how",
    [
        _raises(RuntimeError("boom")),
        _raises(ValueError("")),
        _raises(IndexError("rows of 5 elements")),
        _raises(SystemExit("rows")),
        _raises(RuntimeError("CUDA error: an illegal memory access was encountered, size 5")),
        lambda x: x.view(-1, 8, 0, 3),
        lambda x: [0][x.shape[-1]],
        lambda x: x.shape.no_such_thing,
        lambda x: (a := x.shape, b := a[:1], b + 1),
    ],
    ids=["no reason", "no words", "index", "exit", "device", "view", "list", "attribute", "operand"],
)
def test_a_breakdown_is_no_refusal(how):
    found = results(_breaks(how), chosen(["accuracy", "widths", "shapes", "strides"]))
    assert {"accuracy-bfloat16", "accuracy-float16", "widths", "shapes", "strides"} <= failing(found)
    assert "which is no clear refusal" in found["widths"].finding
    assert "for 5x1 in float32" in found["widths"].finding


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x must be float32, got torch.bfloat16"),
        RuntimeError("expected scalar type Float but found BFloat16"),
        NotImplementedError("\"rms_norm_impl\" not implemented for 'Half'"),
        TypeError("Got unsupported ScalarType BFloat16"),
        AssertionError("hidden size must be a multiple of 8"),
        RuntimeError("x must be contiguous"),
        RuntimeError("normalized_shape does not fit"),
    ],
    ids=str,
)
def test_a_clear_error_about_the_argument_is_a_refusal(error):
    found = results(_breaks(_raises(error)), chosen(["accuracy", "widths", "shapes", "strides"]))
    assert not failing(found)
    score = conformance.Score.of(found.values())
    assert (score.passed, score.scored, score.refused) == (1, 1, 6)


def test_what_is_not_answered_is_said(capsys, write):
    write(
        "narrow.py",
        NORM.format(name="norm").replace("return", "assert x.dtype == torch.float32, 'float32'\n    return"),
    )
    assert main(["check", "narrow.py", "--only", "accuracy", "--in-process"]) == 0
    out = capsys.readouterr().out
    assert "1 of 1 scored checks passed" in out
    assert "not answered, because it refused: accuracy-bfloat16, accuracy-float16, accuracy-float64." in out
    # Nothing answered is nothing checked.
    assert main(["check", "narrow.py", "--only", "accuracy-bfloat16", "--in-process"]) == 2
    assert main(["check", "torch", "--only", "weight-offset", "--in-process"]) == 2


def test_without_a_compiler_compiled_code_is_not_asked_for():
    # Not by monkeypatch, which deletes what it restores in PyTorch's modules of settings.
    no_compiler = torch._inductor.config.patch({"cpp.cxx": ("/nowhere/c++",)})
    with no_compiler, torch.compiler.config.patch(force_disable_caches=True):
        found = results(conformance.load("torch"), chosen(["compile"]))
    assert {r.verdict for r in found.values()} == {NOT_APPLICABLE}
    assert "torch.compile does not work here" in found["compile"].measured
