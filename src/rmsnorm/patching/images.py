"""Modules that normalise the channels of images or videos, run as if those were the last dimension."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from rmsnorm.patching.convention import Convention
from rmsnorm.patching.specimen import Specimen

CHANNELS = 1  # the dimension of an image that holds them


class Images(Specimen):
    """A specimen that takes rows, shows them to the module as the pixels of images, and gives rows back.

    Args:
        dims: how many dimensions an image has: 4, or 5 for videos.
    """

    def __init__(self, module: nn.Module, *classes: Any, dims: int) -> None:
        super().__init__(module, *classes)
        self._dims, self._shapes = dims, {name: t.shape for name, t in self.tensors.items()}
        self.tensors = {name: t.flatten() if _is_vector(t) else t for name, t in self.tensors.items()}

    def own_shape(self, name: str) -> Any:
        """A vector may be spread over an image, as (channels, 1, 1)."""
        return self._shapes[name]

    def run(
        self, *inputs: Tensor, tensors: Mapping[str, Tensor] | None = None, training: bool = False, grad: bool = False
    ) -> Tensor:
        """Rows, in the shape of the first input."""
        values = {name: t.detach().to(inputs[0].dtype, copy=True) for name, t in self.tensors.items()} | dict(
            tensors or {}
        )
        spread = {
            name: t.view([-1 if size > 1 else 1 for size in self._shapes[name]])
            if name in self._shapes and _is_vector(t)
            else t
            for name, t in values.items()
        }
        images = [self._image(x) for x in inputs]
        y = super().run(*images, tensors=spread, training=training, grad=grad)
        return y.movedim(CHANNELS, -1).reshape(inputs[0].shape)

    def _image(self, x: Tensor) -> Tensor:
        """The first of the leading dimensions counts images; the others are their height, width and time."""
        number, *rest = x.shape[:-1] or (1,)
        across = self._dims - 2
        if len(rest) > across:
            rest = [*rest[: across - 1], math.prod(rest[across - 1 :])]
        rest += [1] * (across - len(rest))
        return x.reshape(number, *rest, x.shape[-1]).movedim(-1, CHANNELS).contiguous()


def specimen_of(module: nn.Module, convention: Convention) -> Specimen:
    """What runs a module of that convention on rows."""
    return Specimen(module) if convention.dims is None else Images(module, dims=convention.dims)


def _is_vector(t: Tensor) -> bool:
    return t.numel() > 1 and t.numel() == max(t.shape)
