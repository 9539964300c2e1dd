"""The guides: their examples run, their commands exist, their links lead somewhere, their prose is wrapped."""

import ast
import contextlib
import io
import logging
import re

import pytest

from tests.docs import commands
from tests.docs.markdown import PAGES, ROOT, blocks, name, without_blocks

# Output, formulas and layouts of files: nothing in them runs.
INERT = ("text",)
WRAP = 100


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_runs_is_inert_or_says_why_it_does_not_run(page):
    for block in blocks(page):
        assert block.language in ("python", "bash", *INERT), (
            f"{name(page)}:{block.line} names no language that is tested"
        )
        if block.reason is not None:
            assert block.language not in INERT, f"{name(page)}:{block.line}: nothing to run, so nothing to excuse"
            assert len(block.reason.split()) >= 4, f"{name(page)}:{block.line}: no reason"


@pytest.mark.parametrize("page", [p for p in PAGES if any(b.language == "python" for b in blocks(p))], ids=name)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of onnxscript's imports
def test_examples_run(page):
    """Each page from its first block to its last, in one namespace; blocks that do not run are Python all the same."""
    namespace = {}
    logging.disable(logging.WARNING)
    try:
        for block in blocks(page):
            if block.language != "python":
                continue
            tree = ast.parse(block.text)
            if block.reason is None:
                ast.increment_lineno(tree, block.line)
                with contextlib.redirect_stdout(io.StringIO()):
                    exec(compile(tree, name(page), "exec"), namespace)  # noqa: S102 - the example is ours
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize("page", [p for p in PAGES if any(b.language == "bash" for b in blocks(p))], ids=name)
def test_commands_exist(page, monkeypatch):
    for block in blocks(page):
        if block.language == "bash" and block.reason is None:
            for words in commands.lines(block.text):
                commands.check(words, monkeypatch)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_in_sentences_exist(page, monkeypatch):
    for line in re.findall(r"`((?:rmsnorm|make) [a-z-]+(?:\s[^`]*)?)`", without_blocks(page)):
        for words in commands.lines(line.replace("\n", " ")):
            commands.check(words, monkeypatch)


def anchors(page):
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", without_blocks(page)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", [p for p in PAGES if not p.name.startswith("gpu_")], ids=name)  # those are tables
def test_prose_is_wrapped(page):
    """Tables are not, nor are lists in pages that are made by a command."""
    text = without_blocks(page)
    kept = ("|", "- ") if "; do not edit." in text else ("|",)
    for number, line in enumerate(text.splitlines(), 1):
        long = len(line) > WRAP and not line.startswith(kept) and " " in line.strip().lstrip("-*> ").lstrip()
        assert not long, f"{name(page)}:{number} has {len(line)} characters"


def test_the_files_of_the_design_exist():
    text = (ROOT / "docs" / "design.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    paths = {p for p in re.findall(r"`([\w./]+)`", text) if p.startswith(("src/", "csrc/", "tests/", "benchmarks/"))}
    assert len(paths) > 30
    assert not [path for path in sorted(paths) if not (ROOT / path).exists()]
