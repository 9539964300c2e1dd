"""docs/conformance.md is what its generator writes, and norms still have the marks that it gives them."""

import pytest
import torch

from rmsnorm import conformance as suite
from rmsnorm.conformance import named
from tests.wild import conformance

# Compiling takes seconds each, and threads are a matter of the machine.
CHECKS = [c for c in suite.CHECKS if not c.name.startswith(("compile", "thread"))]


def test_the_page_asks_what_the_suite_asks():
    page = conformance.PAGE.read_text()
    assert page.startswith(conformance._INTRODUCTION + conformance.questions())
    assert all(set(column) == {c.name for c in suite.CHECKS} for column in conformance.marks(page).values())


def test_every_name_is_on_the_page():
    page = conformance.PAGE.read_text()
    missing = page.partition("## Not examined here")[2]
    assert all(name in conformance.marks(page) or f"- {name}" in missing for name in named.NAMES)


@pytest.mark.wild("transformers")
@pytest.mark.parametrize("name", ["rmsnorm", "torch", "transformers-llama", "transformers-gemma", "transformers-t5"])
def test_the_marks_are_those_that_the_page_gives(name, with_threads):
    with with_threads(1):
        found = suite.run(suite.load(name), CHECKS, device=torch.device("cpu"))
        marks = {r.name: conformance.MARKS[r.verdict] for r in found}
    page = conformance.marks(conformance.PAGE.read_text())[name]
    assert marks == {check: page[check] for check in marks}


def test_a_page_is_laid_out_from_reports():
    found = suite.run(suite.load("torch"), CHECKS[:4], device=torch.device("cpu"))
    results = [vars(r) for r in (*found, *suite.suite.skipped(c for c in suite.CHECKS if c not in CHECKS[:4]))]
    score = {"passed": 4, "scored": 4, "extras_passed": 0, "extras": 0}
    report = {"source": "torch", "results": results, "score": score}
    page = conformance.document({"rmsnorm": report, "torch": report}, ["apex is not installed"])
    assert conformance.marks(page)["torch"]["accuracy-float32"] == "✓"
    assert "- apex is not installed." in page
