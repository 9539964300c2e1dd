"""What `patch` found, as data and as a table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rmsnorm.patching.convention import Convention


@dataclass(frozen=True)
class Entry:
    """One module: its name in the model, its class, and either the convention it was replaced in or why it was not."""

    name: str
    module: str
    convention: Convention | None
    replaced: bool = False
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """All norms of a model; `others` counts the modules that normalise nothing."""

    entries: tuple[Entry, ...]
    others: int = 0

    @property
    def replaced(self) -> tuple[Entry, ...]:
        """The modules that use this library now."""
        return tuple(entry for entry in self.entries if entry.replaced)

    @property
    def left(self) -> tuple[Entry, ...]:
        """The norms that stay as they were, each with its reason."""
        return tuple(entry for entry in self.entries if not entry.replaced)

    def __str__(self) -> str:
        lines = [f"{len(self.replaced)} norms replaced, {len(self.left)} left alone, {self.others} other modules"]
        if self.replaced:
            replaced = [
                (_counted(names), first.module, str(first.convention), first.convention.proof())
                for first, names in _grouped(self.replaced)
                if first.convention is not None
            ]
            lines += ["", *_table(("replaced", "class", "convention", "against its own forward"), replaced)]
        if self.left:
            left = [(_counted(names), first.module, first.reason) for first, names in _grouped(self.left)]
            lines += ["", *_table(("left alone", "class", "because"), left)]
        return "\n".join(lines)


def _grouped(entries: Iterable[Entry]) -> list[tuple[Entry, list[str]]]:
    """Entries that say the same, but for the number of the layer."""
    groups: dict[tuple[object, ...], tuple[Entry, list[str]]] = {}
    for entry in entries:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", entry.name)
        key = pattern, entry.module, entry.convention, entry.reason
        groups.setdefault(key, (entry, []))[1].append(pattern)
    return list(groups.values())


def _counted(names: list[str]) -> str:
    name = names[0] or "(the model itself)"
    return name if len(names) == 1 else f"{name} ({len(names)})"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    ruled = (head, tuple("-" * width for width in widths), *rows)
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in ruled]
