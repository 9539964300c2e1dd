"""`rmsnorm check`: every planted fault is caught and named, and nothing right is accused."""

import pytest
import torch
from torch import nn

import rmsnorm
from rmsnorm import conformance
from rmsnorm.conformance import CHECKS, chosen
from rmsnorm.conformance.outcome import FAIL, NOT_APPLICABLE, NOT_PROMISED, PASS
from tests.conformance import faulty
from tests.conformance.faulty import around, formula, quantized
from tests.conformance.suite import SCORED, failing, results


@pytest.mark.parametrize("fault", faulty.FAULTS, ids=lambda fault: fault.norm.__name__.replace(" ", "_"))
def test_a_fault_is_named(fault):
    # Rows by the ten thousand are for what fails there.
    found = results(fault.norm, [c for c in SCORED if c.name != "many-rows" or c.name in fault.named])
    failed = failing(found)
    assert set(fault.named) <= failed
    assert fault.says in found[fault.named[0]].finding
    assert failed <= {*fault.named, *fault.consequences}


@pytest.mark.parametrize(
    "norm",
    [
        formula.right,
        formula.right_with_offset,
        formula.Right,
        formula.squares_in_float32,
        torch.nn.functional.rms_norm,
        torch.nn.RMSNorm,
        torch.nn.RMSNorm(48, eps=1e-6),
    ],
    ids=["float64", "with an offset", "a class", "float32", "torch", "torch.nn", "a module"],
)
def test_a_right_norm_is_not_accused(norm):
    assert not failing(results(norm))


@pytest.mark.parametrize(
    ("norm", "about", "said"),
    [
        (around.add, "residual", {"residual-bfloat16": "norms the rounded sum", "residual-sum": "rounded once"}),
        (around.add_exact, "residual", {"residual-bfloat16": "norms the exact sum", "residual-dtype": "as it is"}),
        (around.add_in_place, "residual", {"residual-unchanged": "it writes over them"}),
        (around.add_without_the_sum, "residual", {"residual-sum": "it returns no sum"}),
        (around.gated, "gate", {"gate-float32": "silu, after the norm"}),
        (around.gated_after, "gate", {"gate-float32": "silu, after the norm"}),
        (around.gated_before, "gate", {"gate-float32": "silu, before the norm"}),
        (around.gated_by_a_sigmoid, "gate", {"gate-float32": "sigmoid, after the norm"}),
        (around.grouped, "groups", {"groups-float32": "5 sizes"}),
        (around.grouped_by_their_number, "groups", {"groups-float32": "5 sizes"}),
        (around.groups_of_sixteen, "groups", {"convention": "in groups of 16", "groups-nan": "its own"}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_stands_around_a_norm_is_found_and_not_accused(norm, about, said):
    found = results(norm, [c for c in SCORED if c.name != "many-rows"])
    assert not failing(found)
    for check, words in said.items():
        assert words in found[check].measured
    if "convention" not in said:  # all of them are asked, but those of what it does not have
        answered = {c.name for c in SCORED if c.about == about and found[c.name].verdict == PASS}
        assert len(answered) >= len([c for c in SCORED if c.about == about]) - 2


@pytest.mark.parametrize(
    ("norm", "form"),
    [
        (quantized.int8, "* w, in int8 with a scale for each row"),
        (quantized.exact_norm, "* w, in int8 with a scale for each row"),
        (quantized.e4m3, "* w, in float8_e4m3fn with a scale for each row"),
        (quantized.e5m2, "* w, in float8_e5m2 with a scale for each row"),
        (quantized.blocks_of_32, "* w, in int8 with a scale for each block of 32"),
        (quantized.powers_of_two, "* w, in float8_e4m3fn with a power of two for each block of 32"),
        (quantized.without_gradients, "* w, in int8 with a scale for each row"),
        (rmsnorm.rms_norm_quantized, "* w, in int8 with a scale for each row"),
        (quantized.ours_in_blocks_of_64, "* w, in float8_e4m3fn with a scale for each block of 64"),
        (quantized.ours_by_powers_of_two, "* w, in float8_e5m2 with a power of two for each block of 32"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_quantised_norm_is_examined_as_one(norm, form):
    found = results(norm)
    assert found["convention"].measured.endswith(form)
    answered = {c.name: found[c.name].verdict for c in SCORED if c.about == "quantized"}
    assert set(answered.values()) == {PASS}
    assert {r.verdict for name, r in found.items() if name not in answered} == {PASS, NOT_APPLICABLE}


def test_a_norm_of_bfloat16_alone_is_examined_in_it():
    def norm(x, weight, eps=1e-6):
        if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
            raise ValueError(f"x must be bfloat16, got {x.dtype}")
        return formula.right(x, weight, eps)

    found = results(norm, [c for c in SCORED if c.name != "many-rows"])
    assert not failing(found)
    assert found["convention"].measured == "x / sqrt(mean(x^2) + 1e-05) * w, rounded once"
    passed = {name for name, r in found.items() if r.verdict == PASS}
    assert {"accuracy-bfloat16", "eps", "strides", "shapes", "empty", "dx-bfloat16", "surroundings"} <= passed


@pytest.mark.parametrize(
    "name",
    [
        "rmsnorm",
        "rmsnorm-module",
        "rmsnorm-llama",
        "rmsnorm-t5",
        "rmsnorm-gemma",
        "rmsnorm-add",
        "rmsnorm-add-exact",
        "rmsnorm-gated",
    ],
)
def test_ours_has_the_full_score_extras_included(name):
    checks = [c for c in CHECKS if not c.name.startswith("compile")]
    found = results(conformance.load(name), checks, strict=True)
    verdicts = {check: r.verdict for check, r in found.items() if r.verdict != PASS}
    assert all(verdict == NOT_APPLICABLE for verdict in verdicts.values()), verdicts
    score = conformance.Score.of(found.values())
    assert (score.passed, score.extras_passed) == (score.scored, len([c for c in checks if c.extra]))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rmsnorm", "* w, rounded once"),
        ("rmsnorm-llama", "* w, rounded before the weight, and after"),
        ("rmsnorm-t5", "* w, rounded to the weight's dtype, and after"),
        ("rmsnorm-gemma", "* (w + 1), rounded once"),
        ("torch", "x / sqrt(mean(x^2) + 1e-05) * w, rounded once"),
    ],
)
def test_conventions_are_found(name, words):
    found = results(conformance.load(name), chosen(["convention"]))["convention"]
    assert found.verdict == PASS
    assert found.measured.endswith(words)


def test_another_convention_than_expected_is_a_finding():
    for expected in (conformance.Expected(offset=1.0), conformance.Expected(rounding="before_scale")):
        found = results(formula.right, chosen(["convention"]), expected=expected)["convention"]
        assert found.verdict == FAIL
        assert "was expected" in found.finding


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (nn.LayerNorm, "a LayerNorm"),
        (lambda x, weight, eps=0.0: torch.nn.functional.normalize(x, dim=-1) * weight, "an L2 normalisation"),
        (lambda x, weight, eps=0.0: x * weight, "does not normalise"),
        (lambda x, weight, eps=0.0: formula.right(x, torch.ones_like(weight)), "its weight has no effect"),
    ],
)
def test_what_is_no_rms_norm_fails_at_once(norm, reason):
    found = results(norm)
    assert failing(found) == {"convention"}
    assert reason in found["convention"].finding
    assert {r.verdict for name, r in found.items() if name != "convention"} == {NOT_APPLICABLE}


def test_extras_are_scored_for_those_who_promise_them():
    checks = chosen(["batch-invariance", "order-invariance", "whole-range", "accuracy-float64"])
    found = results(formula.other_sum_for_large_batches, checks)
    assert {r.verdict for r in found.values()} == {NOT_PROMISED}
    assert "differs between batches of 33 and 165" in found["batch-invariance"].finding
    assert failing(results(formula.other_sum_for_large_batches, checks, strict=True)) == {c.name for c in checks}
    assert {r.verdict for r in results(formula.right, checks).values()} == {PASS}


def test_results_that_depend_on_threads_are_found():
    checks = chosen(["thread-invariance"])
    assert failing(results(formula.other_sum_for_more_threads, checks, strict=True)) == {"thread-invariance"}
    assert torch.get_num_threads() == 1


def test_a_number_of_threads_that_is_set_from_the_first_call_on_is_found():
    def norm(x, weight, eps=1e-6):
        torch.set_num_threads(2)
        return formula.right(x, weight, eps)

    assert "the number of threads" in results(norm, chosen(["process-settings"]))["process-settings"].finding


def test_compiled_results_are_compared_with_eager_ones():
    checks = chosen(["compile"])
    assert failing(results(formula.other_results_compiled, checks, strict=True)) == {"compile", "compile-bits"}
    found = results(conformance.load("rmsnorm"), checks)
    assert [r.verdict for r in found.values()] == [PASS, PASS]


def test_for_inference_no_gradient_is_asked_for():
    implementation = conformance.load("torch")
    bare = conformance.Implementation("it", implementation.make, implementation.calls, trains=False)
    found = results(bare, chosen(["dx", "dweight"]))
    assert {r.verdict for r in found.values()} == {NOT_APPLICABLE}
