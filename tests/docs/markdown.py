"""Reads the guides: their code blocks, their links and their lines of prose."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = tuple(sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.md")]))
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_NOT_RUN = re.compile(r"<!-- not run: (.+?) -->\s*\Z", re.DOTALL)


class Block(NamedTuple):
    """A fenced block: its first line, its language, its text, and why it is not run, if it is not."""

    line: int
    language: str
    text: str
    reason: str | None


def name(page):
    return page.relative_to(ROOT).as_posix()


def blocks(page):
    """The code blocks of a page. `<!-- not run: REASON -->` before a block says why it cannot run in a test."""
    text = page.read_text()
    for found in _FENCE.finditer(text):
        said = _NOT_RUN.search(text[: found.start()])
        yield Block(text[: found.start()].count("\n") + 1, found[2], found[3], said and said[1])


def without_blocks(page):
    """The page with the same lines, those of code blocks empty."""
    return _FENCE.sub(lambda found: "\n" * found[0].count("\n"), page.read_text())
