"""The launches of the backward: which kernels take a shape, and in which order."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rmsnorm.gpu import configurations, launching, layout
from rmsnorm.gpu.call_cache import Step
from rmsnorm.gpu.configurations import Tile
from rmsnorm.gpu.kernels import backward as kernels
from rmsnorm.gpu.kernels import fold as fold_kernels
from rmsnorm.gpu.kernels import rebuild as rebuild_kernels
from rmsnorm.gpu.launching import INTERPRETED, Kernel
from rmsnorm.numerics.fixed_sum import leaves as leaves_of
from rmsnorm.spec import ACTIVATIONS, NormSpec

_BACKWARD = Kernel(kernels.backward)
_SLOPES = Kernel(kernels.slopes)
_REBUILD = Kernel(rebuild_kernels.rebuild)
_FOLD = Kernel(fold_kernels.fold)


def rebuild(place: layout.Rows, tensors: dict[str, Tensor], offset: float) -> Step:
    """Fills `rebuilt` from what is called x, and is y."""
    names = "x", "rebuilt", "rstd", "weight" if "weight" in tensors else ""
    given = [tensors.get(name) for name in names]
    cols, device = tensors["x"].shape[-1], tensors["x"].device
    tile = configurations.columns(2, launching.target(device))
    constants = place.nested, tile.block, INTERPRETED
    arguments = *given, cols, place.inner, *place.strides, offset or None, *constants
    aligned = layout.aligned(cols, place.strides, *given)
    grid = place.number, -(-cols // tile.block), 1
    return launching.prepare(_REBUILD, device, grid, arguments, aligned, tile.warps), names


class Fold(NamedTuple):
    """One pass over the sums of leaves, as many at a time as one program adds."""

    tile: Tile
    left: int  # sums
    grid: tuple[int, int, int]
    rest: tuple[Any, ...]  # the kernel's arguments that are no tensors


def fold_of(leaves: int, width: int, target: Any) -> Fold:
    tile = configurations.fold(target)
    tiles, left = -(-width // tile.block), -(-leaves // tile.rows)
    rest = leaves, width, tiles, tile.rows, _log(tile.rows // 8), tile.block, INTERPRETED
    return Fold(tile, left, (left * tiles, 1, 1), rest)


class Backward:
    """One backward: its steps, and the memory between them.

    Args:
        place: the rows of dy, x, gate, dh, dx and dgate.
        tensors: by the kernels' names, with dweight; those that are absent or not wanted are not among them.
    """

    def __init__(self, place: layout.Rows, tensors: dict[str, Tensor], spec: NormSpec) -> None:
        x = tensors["x"]
        self._place, self._tensors, self._spec = place, tensors, spec
        self._width, self._device, self._target = x.shape[-1], x.device, launching.target(x.device)
        self._cols = spec.group_size or self._width
        self._groups, self._leaves = self._width // self._cols, leaves_of(place.number)
        self._gated = "gate" in tensors
        self.scratch: dict[str, Tensor] = {}

    def steps(self) -> list[Step]:
        leaves, sums = self._leaves, ""
        if "dweight" in self._tensors:
            sums = "dweight" if leaves == 1 else self._planned("leaves", leaves, self._width)
        tile = configurations.backward(self._cols, self._target, self._gated)
        steps = []
        if "dx" not in self._tensors and "dgate" not in self._tensors:
            steps += [self._columns(False, "", sums)] if sums else []
        elif tile is None:
            k = self._planned("k", self._place.number, self._groups)
            steps += [self._slopes(k), self._columns(True, k, sums)]
        elif not sums or (tile.rows == 1 and configurations.fused(self._place.number, leaves * self._groups)):
            steps += [self._rows(tile, sums)]
        else:
            steps += [self._rows(tile, ""), self._columns(False, "", sums)]
        while leaves > 1 and sums:
            fold = fold_of(leaves, self._width, self._target)
            total = "dweight" if fold.left == 1 else self._planned(f"{fold.left} sums", fold.left, self._width)
            steps.append(self._step(_FOLD, fold.grid, (sums, total), fold.rest, fold.tile, self._width, ()))
            sums, leaves = total, fold.left
        return steps

    def _planned(self, name: str, *shape: int) -> str:
        self.scratch[name] = self._tensors[name] = layout.planned(shape, torch.float32)
        return name

    def _rows(self, tile: Tile, sums: str) -> Step:
        """dx and dgate of whole groups, and with `sums` the leaves of dweight."""
        full = tile.block == self._cols
        return self._backward(tile, True, "", sums, 1, (full, 1, *self._sums()))

    def _columns(self, with_gradients: bool, k: str, sums: str) -> Step:
        """Some columns at a time: the leaves of dweight, and dx and dgate from k."""
        itemsize = min(t.dtype.itemsize for name, t in self._tensors.items() if name in ("dy", "x", "gate"))
        tile = configurations.columns(itemsize, self._target)
        unroll = configurations.unroll(with_gradients, self._gated)
        return self._backward(tile, with_gradients, k, sums, -(-self._cols // tile.block), (False, unroll, None, None))

    def _backward(
        self, tile: Tile, with_gradients: bool, k: str, sums: str, pieces: int, constants: tuple[Any, ...]
    ) -> Step:
        place, cols = self._place, self._cols
        gradients = ("dh", "dx", "dgate") if with_gradients else ("", "", "")
        names = "dy", "x", "gate", *gradients, "rstd", "weight", k, sums
        numbers = place.number, cols, place.inner, *place.strides, _log(self._leaves), *self._scalars()
        rest = *numbers, *self._options(), tile.rows, tile.block, *constants, INTERPRETED
        programs = self._leaves if sums else -(-place.number // tile.rows)
        return self._step(_BACKWARD, (programs * self._groups, pieces, 1), names, rest, tile, cols, place.strides)

    def _slopes(self, k: str) -> Step:
        place, tile = self._place, configurations.slopes(self._target)
        numbers = self._cols, place.inner, *place.strides[:6], *self._scalars()
        names = "dy", "x", "gate", "rstd", "weight", k
        rest = *numbers, *self._options(), tile.block, *self._sums(), INTERPRETED
        grid = place.number * self._groups, 1, 1
        return self._step(_SLOPES, grid, names, rest, tile, self._cols, place.strides[:6])

    def _scalars(self) -> tuple[float, float | None]:
        return 1.0 / self._cols, self._spec.weight_offset or None

    def _options(self) -> tuple[Any, ...]:
        silu = ACTIVATIONS[self._spec.activation] == "silu"
        return self._groups, silu, self._spec.gate_first, self._place.nested

    def _sums(self) -> tuple[int, int]:
        return configurations.log_cols(self._cols), configurations.form(self._target, self._cols, self._gated)

    def _step(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        names: tuple[str, ...],
        rest: tuple[Any, ...],
        tile: Tile,
        cols: int,
        strides: tuple[int, ...],
    ) -> Step:
        names = tuple(name if name in self._tensors else "" for name in names)
        tensors = [self._tensors.get(name) for name in names]
        aligned = layout.aligned(cols, strides, *tensors)
        return launching.prepare(kernel, self._device, grid, (*tensors, *rest), aligned, tile.warps), names


def _log(n: int) -> int:
    """Of a power of two."""
    return n.bit_length() - 1
