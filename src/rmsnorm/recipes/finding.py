"""The norms of a model, found by what they compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from rmsnorm.patching.convention import Convention
from rmsnorm.patching.specimen import require_module
from rmsnorm.patching.survey import survey


class Norm(NamedTuple):
    """A norm of a model; or what looks like one, with the reason why it was not recognised."""

    name: str
    module: nn.Module
    convention: Convention | None
    reason: str

    @property
    def class_name(self) -> str:
        """Of its own class, patched or not."""
        return getattr(type(self.module), "_rmsnorm_original", type(self.module)).__name__

    @property
    def gain(self) -> Tensor | None:
        """Its weight."""
        weight = None if self.convention is None else self.convention.weight
        return None if weight is None else getattr(self.module, weight)


def norms_of(model: nn.Module) -> Iterator[Norm]:
    """Every norm of a model once, in the order of `named_modules`."""
    require_module("model", model)
    for found in survey(model):
        entry = found.entry
        if entry.convention is not None or entry.reason:
            yield Norm(entry.name, found.module, entry.convention, entry.reason)
