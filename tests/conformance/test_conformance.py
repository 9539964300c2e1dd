"""`rmsnorm check`: every planted fault is caught and named, and nothing right is accused."""

import json
import re
from fractions import Fraction

import pytest
import torch
from torch import nn

import rmsnorm
from rmsnorm import conformance
from rmsnorm.cli import check, main
from rmsnorm.conformance import CHECKS, calling, chosen, exact
from rmsnorm.conformance.calling import understand
from rmsnorm.conformance.form import find
from rmsnorm.conformance.implementation import CannotCheck
from rmsnorm.conformance.outcome import FAIL, NOT_APPLICABLE, NOT_PROMISED, PASS
from rmsnorm.conformance.rows import hard_rows
from tests.conformance import faulty
from tests.support import exact as rational

# torch.compile takes seconds: it has tests of its own.
SCORED = tuple(c for c in CHECKS if not c.extra and c.name != "compile")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread(with_threads):
    with with_threads(1):
        yield


def results(target, checks=SCORED, **options):
    implementation = target if isinstance(target, conformance.Implementation) else understand(target, "it")
    return {r.name: r for r in conformance.run(implementation, checks, device=CPU, **options)}


def failing(found):
    return {name for name, result in found.items() if result.verdict == FAIL}


@pytest.mark.parametrize("fault", faulty.FAULTS, ids=lambda fault: fault.norm.__name__.replace(" ", "_"))
def test_a_fault_is_named(fault):
    found = results(fault.norm)
    failed = failing(found)
    assert set(fault.named) <= failed
    assert fault.says in found[fault.named[0]].finding
    assert failed <= {*fault.named, *fault.consequences}


@pytest.mark.parametrize(
    "norm",
    [
        faulty.right,
        faulty.right_with_offset,
        faulty.Right,
        faulty.squares_in_float32,
        torch.nn.functional.rms_norm,
        torch.nn.RMSNorm,
        torch.nn.RMSNorm(48, eps=1e-6),
    ],
    ids=["float64", "with an offset", "a class", "float32", "torch", "torch.nn", "a module"],
)
def test_a_right_norm_is_not_accused(norm):
    assert not failing(results(norm))


@pytest.mark.parametrize("name", ["rmsnorm", "rmsnorm-module", "rmsnorm-llama", "rmsnorm-t5", "rmsnorm-gemma"])
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
        found = results(faulty.right, chosen(["convention"]), expected=expected)["convention"]
        assert found.verdict == FAIL
        assert "was expected" in found.finding


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (nn.LayerNorm, "a LayerNorm"),
        (lambda x, weight, eps=0.0: torch.nn.functional.normalize(x, dim=-1) * weight, "an L2 normalisation"),
        (lambda x, weight, eps=0.0: x * weight, "does not normalise"),
        (lambda x, weight, eps=0.0: faulty.right(x, torch.ones_like(weight)), "its weight has no effect"),
    ],
)
def test_what_is_no_rms_norm_fails_at_once(norm, reason):
    found = results(norm)
    assert failing(found) == {"convention"}
    assert reason in found["convention"].finding
    assert {r.verdict for name, r in found.items() if name != "convention"} == {NOT_APPLICABLE}


def test_extras_are_scored_for_those_who_promise_them():
    checks = chosen(["batch-invariance", "order-invariance", "whole-range", "accuracy-float64"])
    found = results(faulty.other_sum_for_large_batches, checks)
    assert {r.verdict for r in found.values()} == {NOT_PROMISED}
    assert "differs between batches of 33 and 165" in found["batch-invariance"].finding
    assert failing(results(faulty.other_sum_for_large_batches, checks, strict=True)) == {c.name for c in checks}
    assert {r.verdict for r in results(faulty.right, checks).values()} == {PASS}


def test_results_that_depend_on_threads_are_found():
    checks = chosen(["thread-invariance"])
    assert failing(results(faulty.other_sum_for_more_threads, checks, strict=True)) == {"thread-invariance"}
    assert torch.get_num_threads() == 1


def test_compiled_results_are_compared_with_eager_ones():
    checks = chosen(["compile"])
    assert failing(results(faulty.other_results_compiled, checks, strict=True)) == {"compile", "compile-bits"}
    found = results(conformance.load("rmsnorm"), checks)
    assert [r.verdict for r in found.values()] == [PASS, PASS]


def test_what_is_refused_is_not_scored():
    def norm(x, weight, eps=1e-6):
        if x.dtype != torch.float32 or not x.is_contiguous() or x.shape[-1] % 8:
            raise ValueError("contiguous float32 in multiples of 8")
        return faulty.right(x, weight, eps)

    found = results(norm)
    assert not failing(found)
    refused = {name for name, r in found.items() if r.verdict == NOT_PROMISED}
    assert {"accuracy-bfloat16", "widths", "strides"} <= refused
    assert "contiguous float32" in found["accuracy-bfloat16"].measured


def test_for_inference_no_gradient_is_asked_for():
    implementation = conformance.load("torch")
    bare = conformance.Implementation("it", implementation.make, implementation.calls, trains=False)
    found = results(bare, chosen(["dx", "dweight"]))
    assert {r.verdict for r in found.values()} == {NOT_APPLICABLE}


# What is right.


def test_float64_is_exact_enough():
    """exact.py's own bound, 2^-22 of a unit in the last place of float32, against rational arithmetic."""
    for x in hard_rows(1000, torch.float32)[::2]:
        weight = torch.randn(1000, generator=torch.Generator().manual_seed(0))
        y = exact.normalized(x, weight.double(), 1e-5)
        r = rational.inverse_rms(x, 1e-5)
        correct = [Fraction(a) * Fraction(b) * r for a, b in zip(x.tolist(), weight.tolist(), strict=True)]
        units = exact.unit(y, torch.float32).tolist()
        worst = max(abs(Fraction(a) - b) / Fraction(u) for a, b, u in zip(y.tolist(), correct, units, strict=True))
        assert worst < 2.0**-22


def test_units_in_the_last_place():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        numbers = torch.tensor([1.0, 1.5, 2.0, 3.999, 0.1, -7.0]).to(dtype)
        beside = torch.nextafter(numbers, torch.full_like(numbers, torch.inf))
        assert torch.equal(exact.unit(numbers.double().abs(), dtype)[:5], (beside.double() - numbers.double())[:5])
        assert exact.errors(beside, numbers.double()).tolist()[:5] == [1.0] * 5
    big = torch.tensor([1e39], dtype=torch.float64)
    assert exact.errors(torch.tensor([torch.inf]), big).tolist() == [0.0]
    assert exact.errors(torch.tensor([3e38]), big).tolist() == [torch.inf]


def test_float64_errors_are_those_of_rational_arithmetic():
    x = torch.randn(2, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = exact.normalized(x, None, 1e-5)
    assert exact.float64_errors(y, x, None, 1e-5, "inside").max() < 3
    # One number more or less is one unit.
    up = torch.nextafter(y, y.sign() * torch.inf)
    moved = exact.float64_errors(up, x, None, 1e-5, "inside") - exact.float64_errors(y, x, None, 1e-5, "inside")
    assert moved.abs().max() <= 1 + 1e-9  # the difference of two rounded numbers


@pytest.mark.parametrize("place", list(exact.PLACES))
def test_every_place_of_eps_is_recognised(place):
    def norm(x, weight, eps=1e-6):
        return (x.double() * exact.reciprocal(x, eps, place) * weight.double()).to(x.dtype)

    assert find(understand(norm, "it"), CPU).place == place


# How it is called.


def _with_out(out, x, weight, eps):
    out.copy_(faulty.right(x, weight, eps))


class _Epsilon(nn.Module):
    def __init__(self, features, epsilon=1e-6, add_unit_offset=False):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(1, features))
        self.epsilon, self.offset = epsilon, float(add_unit_offset)

    def forward(self, x):
        return faulty.right(x, self.gamma + self.offset, self.epsilon)


class _OffsetSecond(nn.Module):
    """No eps, and what stands in its place is something else."""

    def __init__(self, dim, unit_offset=False):
        super().__init__()
        self.g = nn.Parameter(torch.ones(dim))
        self.unit_offset = unit_offset

    def forward(self, x):
        return faulty.right(x, self.g + float(self.unit_offset), 1e-6)


@pytest.mark.parametrize(
    ("target", "calls"),
    [
        (lambda x, weight, eps: faulty.right(x, weight, eps), "it(x, weight=weight, eps=eps)"),
        (lambda h, gain, variance_epsilon: faulty.right(h, gain, variance_epsilon), "variance_epsilon=eps"),
        (lambda a, b, c=1e-6: faulty.right(a, b, c), "it(x, weight, eps)"),
        (lambda *given: faulty.right(*given), "it(x, weight, eps)"),
        (
            lambda x, shape, scale, epsilon=1e-6: faulty.right(x, scale, epsilon),
            "it(x, shape=shape, scale=weight, epsilon=eps)",
        ),
        (_with_out, "it(out, x, weight, eps)"),
        (lambda x, eps=1e-6: faulty.right(x, torch.ones(x.shape[-1]), eps), "it(x, eps=eps)"),
        (lambda x, weight, eps: (faulty.right(x, weight, eps), None), "it(x, weight=weight, eps=eps)"),
        (_OffsetSecond, "it(width, unit_offset=offset)(x)"),
        (torch.rms_norm, "it(x, shape, weight, eps)"),
        (_Epsilon, "it(width, epsilon=eps, add_unit_offset=offset)(x)"),
        (lambda width, eps=1e-6: nn.RMSNorm(width, eps=eps), "it(width, eps=eps)(x)"),
        (nn.RMSNorm(32), "it(x)"),
        (rmsnorm.RMSNorm(32), "it(x)"),
    ],
)
def test_how_it_is_called_is_found(target, calls):
    implementation = understand(target, "it")
    assert calls in implementation.calls
    assert results(implementation, chosen(["convention"]))["convention"].verdict == PASS


def test_what_cannot_be_called_says_what_was_tried():
    def norm(x, weight, eps, secret):
        raise AssertionError

    with pytest.raises(CannotCheck) as raised:
        understand(norm, "mine:norm")
    said = str(raised.value)
    assert "norm(x, weight=weight, eps=eps): TypeError" in said
    assert "secret" in said
    with pytest.raises(CannotCheck, match="neither a function, a class nor a module"):
        understand(3, "three")


def test_weight_names_go_before_positions():
    module = nn.Module()
    module.register_buffer("other", torch.zeros(4))
    module.weight = nn.Parameter(torch.zeros(4))
    assert calling.weight_name(module, 4) == "weight"


# What a user types.


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def file(name, text):
        path = tmp_path / name
        path.write_text("import torch\n" + text)
        return path

    return file


NORM = """
def {name}(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps).to(x.dtype) * weight
"""


def test_a_file_a_module_and_a_name(write):
    path = write("mine_for_check.py", NORM.format(name="my_norm") + "def other(x): return x\n")
    for target in (f"{path}:my_norm", str(path), "mine_for_check.py:my_norm", "mine_for_check:my_norm"):
        assert conformance.load(target).has_weight
    assert conformance.load("torch.nn:RMSNorm").calls == "RMSNorm(width, eps=eps)(x)"
    assert conformance.load("torch.nn:functional.rms_norm").takes_eps


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("troch", "did you mean torch"),
        ("nothing like it", "must be a name that --list shows"),
        ("no_such_module:norm", "no_such_module is not installed"),
        ("torch.nn:RMSNrom", "did you mean RMSNorm"),
        ("torch:float32", "neither a function, a class nor a module"),
        ("nowhere.py:norm", "nowhere.py does not exist"),
        ("raises.py:norm", "raises.py raises on import: ZeroDivisionError"),
        ("leaves:norm", "leaves raises on import: SystemExit"),
        ("two.py", "two.py has 2 candidates; say which: two.py:norm_a, two.py:norm_b"),
        ("empty.py", "empty.py is empty"),
        ("torch.optim:SGD", "could not be called as an RMSNorm"),
    ],
)
def test_what_is_not_there_is_refused_with_a_hint(write, capsys, target, said):
    write("raises.py", "1 / 0\n")
    write("leaves.py", "raise SystemExit\n")
    write("two.py", NORM.format(name="norm_a") + NORM.format(name="norm_b"))
    write("empty.py", "")
    assert main(["check", target]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_the_report_as_a_table_json_and_a_page(capsys, tmp_path):
    page = tmp_path / "page.html"
    assert main(["check", "torch", "--only", "eps", "--only", "order-invariance", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^eps +pass +1e-05 inside the root$", out, re.MULTILINE)
    assert re.search(r"^order-invariance +not promised ", out, re.MULTILINE)
    assert "2 of 2 scored checks passed, 0 of 1 extras hold." in out
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert "<script" not in text
    assert "http" not in text
    assert main(["check", "torch", "--only", "eps", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [r["name"] for r in report["results"]] == ["eps", "eps-text"]
    assert report["score"] == {"passed": 2, "scored": 2, "extras_passed": 0, "extras": 0}


def test_findings_exit_with_1_and_are_told(capsys, tmp_path):
    page = tmp_path / "page.html"
    target = "tests.conformance.faulty:eps_outside_the_root"
    assert main(["check", target, "--only", "eps", "--html", str(page)]) == 1
    assert "eps: eps is not added to the mean inside the root" in capsys.readouterr().out
    assert "not added to the mean inside the root" in page.read_text()
    assert main(["check", "torch", "--only", "order-invariance"]) == 0
    assert main(["check", "torch", "--only", "order-invariance", "--strict"]) == 1
    assert main(["check", "torch", "--only", "convention", "--offset", "1"]) == 1


def test_an_interrupted_check_keeps_what_it_has(capsys, monkeypatch):
    monkeypatch.setattr(check.conformance, "run", _interrupting(conformance.run))
    assert main(["check", "torch", "--json"]) == 130
    report = json.loads(capsys.readouterr().out)
    assert report["interrupted"]
    assert [r["verdict"] for r in report["results"][:3]] == ["pass", "pass", "not run"]


def _interrupting(run):
    def interrupted(implementation, checks, **options):
        for index, result in enumerate(run(implementation, checks, **options)):
            if index == 2:
                raise KeyboardInterrupt
            yield result

    return interrupted


def test_what_a_norm_prints_does_not_spoil_the_report(capsys, write):
    write("talks.py", 'print("imported")\n' + NORM.format(name="norm").replace("return", 'print("called")\n    return'))
    assert main(["check", "talks.py", "--only", "convention", "--json"]) == 0
    captured = capsys.readouterr()
    json.loads(captured.out)
    assert "imported" in captured.err


@pytest.mark.parametrize("arguments", [[], ["torch", "--only", "nothing"], ["torch", "--device", "nowhere"]])
def test_wrong_usage_exits_with_2(arguments, capsys):
    assert main(["check", *arguments]) == 2
    assert capsys.readouterr().err.startswith("rmsnorm check: ")


def test_the_list_has_every_check_and_name(capsys):
    assert main(["check", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(f"{c.name} " in out for c in CHECKS)
    assert "transformers-llama" in out
    assert max(map(len, out.splitlines())) <= 80
