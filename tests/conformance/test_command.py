"""`rmsnorm check`: what a user types, and what is told."""

import json
import re

import pytest

from rmsnorm import conformance
from rmsnorm.cli import check, main
from rmsnorm.conformance import CHECKS
from tests.conformance.suite import NORM


def run(arguments):
    """The command without a process of its own, which would take seconds to start."""
    return main([*arguments, "--in-process"])


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
    assert run(["check", target]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_the_report_as_a_table_json_and_a_page(capsys, tmp_path):
    page = tmp_path / "page.html"
    assert run(["check", "torch", "--only", "eps", "--only", "order-invariance", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^eps +pass +1e-05 inside the root$", out, re.MULTILINE)
    assert re.search(r"^order-invariance +not promised ", out, re.MULTILINE)
    assert "2 of 2 scored checks passed, 0 of 1 extras hold." in out
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert "<script" not in text
    assert "http" not in text
    assert run(["check", "torch", "--only", "eps", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [r["name"] for r in report["results"]] == ["eps", "eps-text"]
    assert report["score"] == {"passed": 2, "scored": 2, "extras_passed": 0, "extras": 0, "refused": 0}


def test_findings_exit_with_1_and_are_told(capsys, tmp_path):
    page = tmp_path / "page.html"
    target = "tests.conformance.faulty.formula:eps_outside_the_root"
    assert run(["check", target, "--only", "eps", "--html", str(page)]) == 1
    assert "eps: eps is not added to the mean inside the root" in capsys.readouterr().out
    assert "not added to the mean inside the root" in page.read_text()
    assert run(["check", "torch", "--only", "order-invariance"]) == 0
    assert run(["check", "torch", "--only", "order-invariance", "--strict"]) == 1
    assert run(["check", "torch", "--only", "convention", "--offset", "1"]) == 1


def test_an_interrupted_check_keeps_what_it_has(capsys, monkeypatch):
    monkeypatch.setattr(check.conformance, "examine", _interrupting(conformance.examine))
    assert run(["check", "torch", "--json"]) == 130
    report = json.loads(capsys.readouterr().out)
    assert report["interrupted"]
    assert [r["verdict"] for r in report["results"][:3]] == ["pass", "pass", "not run"]


def _interrupting(examine):
    def interrupted(*arguments):
        for index, found in enumerate(examine(*arguments)):
            if index == 3:  # the first is what is examined
                raise KeyboardInterrupt
            yield found

    return interrupted


def test_what_a_norm_prints_does_not_spoil_the_report(capsys, write):
    write("talks.py", 'print("imported")\n' + NORM.format(name="norm").replace("return", 'print("called")\n    return'))
    assert run(["check", "talks.py", "--only", "convention", "--json"]) == 0
    captured = capsys.readouterr()
    json.loads(captured.out)
    assert "imported" in captured.err


@pytest.mark.parametrize("arguments", [[], ["torch", "--only", "nothing"], ["torch", "--device", "nowhere"]])
def test_wrong_usage_exits_with_2(arguments, capsys):
    assert run(["check", *arguments]) == 2
    assert capsys.readouterr().err.startswith("rmsnorm check: ")


def test_the_list_has_every_check_and_name(capsys):
    assert main(["check", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(f"{c.name} " in out for c in CHECKS)
    assert "transformers-llama" in out
    assert max(map(len, out.splitlines())) <= 80


CRASHES = """
import ctypes, os
def norm(x, weight, eps=1e-6):
    print("called")
    if x.shape[-1] == 7:
        ctypes.string_at(0)
    if x.isnan().any():
        os._exit(0)
    return (x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps) * weight.double()).to(x.dtype)
"""


def test_a_crash_is_a_finding_and_the_other_checks_run(capfd, write):
    write("crashes.py", CRASHES)
    only = ["--only", "widths", "--only", "nan-inf", "--only", "accuracy-float32", "--json"]
    assert main(["check", "crashes.py", *only]) == 1
    report = json.loads(capfd.readouterr().out)  # and not what it printed
    found = {r["name"]: (r["verdict"], r["finding"]) for r in report["results"]}
    assert found["widths"] == ("fail", "it takes the process down, with SIGSEGV")
    assert found["nan-inf"] == ("fail", "it takes the process down, with exit code 0")
    assert found["accuracy-float32"] == ("pass", "")
    assert report["calls"] == "crashes.py(x, weight=weight, eps=eps)"


def test_a_crash_on_loading_is_told(capfd, write):
    write("gone.py", "import os\nos._exit(3)\n")
    assert main(["check", "gone.py"]) == 2
    assert "takes the process down as it is loaded, with exit code 3" in capfd.readouterr().err
