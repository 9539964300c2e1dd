"""What a recipe did to each norm of a model, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One norm: its name in the model, its class, whether it was changed, and how, or why not."""

    name: str
    module: str
    done: bool
    said: str


class Outcome:
    """All norms of a model; it prints as a table.

    Attributes:
        done, left: the norms that were changed, and those that were not.
        note: what was verified of the whole model, if something was.
    """

    def __init__(self, title: str, steps: Sequence[Step], undo: Callable[[], None], note: str = "") -> None:
        self.done = tuple(step for step in steps if step.done)
        self.left = tuple(step for step in steps if not step.done)
        self.note = note
        self._title = title
        self._undo: Callable[[], None] | None = undo

    def undo(self) -> None:
        """Puts back what was there, to the bit where no weight has changed since; a changed weight is converted.

        Raises:
            ValueError: it was undone before.
        """
        if self._undo is None:
            raise ValueError("it was undone already")
        undo, self._undo = self._undo, None
        undo()

    def __str__(self) -> str:
        lines = [f"{len(self.done)} norms {self._title}, {len(self.left)} left alone"]
        for head, steps in (("", self.done), ("left alone: ", self.left)):
            lines += [f"  {head}{step.name or '(the model itself)'} ({step.module}): {step.said}" for step in steps]
        return "\n".join([*lines, self.note] if self.note else lines)
