"""The launches of the backward: which kernels take a shape, and in which order."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rmsnorm.gpu import configurations, launching, layout
from rmsnorm.gpu.configurations import Tile
from rmsnorm.gpu.kernels import backward as kernels
from rmsnorm.gpu.kernels import columns as column_kernels
from rmsnorm.gpu.launching import INTERPRETED, Kernel, Launch
from rmsnorm.gpu.layout import Maker
from rmsnorm.numerics import fixed_sum
from rmsnorm.ops import layouts

_BACKWARD = Kernel(kernels.backward)
_SLOPES = Kernel(kernels.slopes)
_REBUILD = Kernel(kernels.rebuild)
_COLUMNS = Kernel(column_kernels.columns)
_FOLD = Kernel(column_kernels.fold)


def dweight_dtype(weight: Tensor | None) -> torch.dtype:
    return torch.float32 if weight is None else weight.dtype


def rebuild(y: Tensor, rstd: Tensor, weight: Tensor | None, offset: float | None, dtype: torch.dtype) -> Tensor:
    x = layouts.like(y, dtype)
    place = layout.rows(y, x)
    if place is None:
        y = y.contiguous()
        x = torch.empty_like(y, dtype=dtype)
        place = layout.rows(y, x)
        assert place is not None  # noqa: S101 - contiguous tensors
    if place.number == 0:
        return x
    cols = y.shape[-1]
    tile = configurations.columns(2, launching.target(y.device))
    arguments = (
        *(y, x, rstd, weight, cols, place.inner, *place.strides, offset),
        *(place.nested, tile.block, INTERPRETED),
    )
    key = y.dtype, x.dtype, None if weight is None else weight.dtype, offset is None, place.nested
    aligned = layout.aligned(cols, place.strides, y, x, rstd, weight)
    launching.launch(_REBUILD, y.device, (place.number, -(-cols // tile.block), 1), arguments, key, aligned, tile.warps)
    return x


class Gradients(NamedTuple):
    """Launches one after another, and the float32 memory between them. Tensors have names; what is absent has ""."""

    steps: tuple[tuple[Launch, tuple[str, ...]], ...]
    scratch: tuple[tuple[str, Maker], ...]
    dx: Maker | None
    dweight: Maker | None

    def __call__(
        self, dy: Tensor, x: Tensor, dh: Tensor | None, rstd: Tensor, weight: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        dx = None if self.dx is None else self.dx(x)
        dweight = None if self.dweight is None else self.dweight(x)
        self.fill(dy, x, dh, dx, rstd, weight, dweight)
        return dx, dweight

    def fill(
        self,
        dy: Tensor,
        x: Tensor,
        dh: Tensor | None,
        dx: Tensor | None,
        rstd: Tensor,
        weight: Tensor | None,
        dweight: Tensor | None,
    ) -> None:
        # fmt: off
        tensors = {
            "dy": dy, "x": x, "dh": dh, "dx": dx, "rstd": rstd, "weight": weight, "dweight": dweight, "": None,
        }
        # fmt: on
        for name, make in self.scratch:
            tensors[name] = make(x)
        for launch, names in self.steps:
            launch(*map(tensors.__getitem__, names))


def prepare(
    place: layout.Rows,
    dy: Tensor,
    x: Tensor,
    dh: Tensor | None,
    dx: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    dweight: Tensor | None,
    offset: float | None,
) -> Gradients:
    """Fills dx and dweight, where there are any."""
    cols, target = x.shape[-1], launching.target(x.device)
    leaves = fixed_sum.leaves(place.number)
    given = {"dy": dy, "x": x, "dh": dh, "dx": dx, "rstd": rstd, "weight": weight, "dweight": dweight}
    call = _Call(place, offset, leaves, {name: t for name, t in given.items() if t is not None})
    tile = configurations.backward(cols, target)
    sums = "" if dweight is None else "dweight" if leaves == 1 else call.scratch("leaves", leaves, cols)
    steps = []
    if dx is None:
        steps += [call.columns("", "", "", sums)] if sums else []
    elif tile is None:
        k = call.scratch("k", place.number)
        steps += [call.slopes(k), call.columns("dh", "dx", k, sums)]
    elif not sums or (tile.rows == 1 and configurations.fused(place.number, leaves)):
        steps += [call.rows(tile, sums)]
    else:
        steps += [call.rows(tile, ""), call.columns("", "", "", sums)]
    while leaves > 1 and sums:
        fold = fold_of(leaves, cols, target)
        total = "dweight" if fold.left == 1 else call.scratch(f"{fold.left} sums", fold.left, cols)
        steps.append(call.fold(sums, total, fold))
        sums, leaves = total, fold.left
    return Gradients(
        tuple(steps),
        tuple(call.makers.items()),
        None if dx is None else layout.maker(dx, x),
        None if dweight is None else layout.maker(dweight, x),
    )


class Fold(NamedTuple):
    """One pass over the sums of leaves, as many at a time as one program adds."""

    tile: Tile
    left: int  # sums
    grid: tuple[int, int, int]
    rest: tuple[Any, ...]  # the kernel's arguments that are no tensors


def fold_of(leaves: int, cols: int, target: Any) -> Fold:
    tile = configurations.fold(target)
    tiles, left = -(-cols // tile.block), -(-leaves // tile.rows)
    rest = leaves, cols, tiles, tile.rows, _log(tile.rows // 8), tile.block, INTERPRETED
    return Fold(tile, left, (left * tiles, 1, 1), rest)


class _Call:
    """One backward being planned: its tensors by name, and the steps it may have."""

    def __init__(self, place: layout.Rows, offset: float | None, leaves: int, tensors: dict[str, Tensor]) -> None:
        x, weight = tensors["x"], tensors.get("weight")
        self.place, self.offset, self.leaves, self.tensors = place, offset, leaves, tensors
        self.cols, self.device, self.target = x.shape[-1], x.device, launching.target(x.device)
        self.types = tensors["dy"].dtype, x.dtype, None if weight is None else weight.dtype, offset is None
        self.makers: dict[str, Maker] = {}

    def scratch(self, name: str, *shape: int) -> str:
        self.makers[name] = layout.maker_of(torch.empty(shape, dtype=torch.float32, device="meta"), self.device)
        self.tensors[name] = torch.empty(1, dtype=torch.float32, device=self.device)  # its dtype and alignment
        return name

    def rows(self, tile: Tile, sums: str) -> tuple[Launch, tuple[str, ...]]:
        place, cols = self.place, self.cols
        numbers = place.number, cols, place.inner, *place.strides, _log(self.leaves), 1.0 / cols, self.offset
        constants = place.nested, tile.rows, tile.block, tile.block == cols, *self._sums()
        grid = self.leaves if sums else -(-place.number // tile.rows), 1, 1
        names = "dy", "x", self._name("dh"), "dx", "rstd", self._name("weight"), sums
        return self._step(
            _BACKWARD, grid, names, (*numbers, *constants), (*self.types, cols, place.nested), tile, place.strides
        )

    def slopes(self, k: str) -> tuple[Launch, tuple[str, ...]]:
        tile = configurations.slopes(self.target)
        numbers = self.cols, self.place.inner, *self.place.strides[:4], 1.0 / self.cols, self.offset
        constants = self.place.nested, tile.block, *self._sums()
        names = "dy", "x", "rstd", self._name("weight"), k
        grid = self.place.number, 1, 1
        return self._step(
            _SLOPES,
            grid,
            names,
            (*numbers, *constants),
            (*self.types, self.cols, self.place.nested),
            tile,
            self.place.strides,
        )

    def columns(self, dh: str, dx: str, k: str, sums: str) -> tuple[Launch, tuple[str, ...]]:
        place = self.place
        itemsize = min(self.tensors[name].dtype.itemsize for name in ("dy", "x"))
        tile = configurations.columns(itemsize, self.target)
        numbers = place.number, self.cols, place.inner, *place.strides, _log(self.leaves), self.offset
        constants = place.nested, tile.block, configurations.columns_unroll(bool(dx)), INTERPRETED
        names = "dy", "x", self._name(dh), dx, "rstd", self._name("weight"), k, sums
        grid = self.leaves, -(-self.cols // tile.block), 1
        return self._step(
            _COLUMNS, grid, names, (*numbers, *constants), (*self.types, place.nested), tile, place.strides
        )

    def fold(self, partial: str, total: str, fold: Fold) -> tuple[Launch, tuple[str, ...]]:
        return self._step(_FOLD, fold.grid, (partial, total), fold.rest, (), fold.tile, ())

    def _name(self, name: str) -> str:
        return name if name in self.tensors else ""

    def _sums(self) -> tuple[int, int, bool]:
        return configurations.log_cols(self.cols), configurations.form(self.target, self.cols), INTERPRETED

    def _step(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        names: tuple[str, ...],
        rest: tuple[Any, ...],
        key: tuple[Any, ...],
        tile: Tile,
        strides: tuple[int, ...],
    ) -> tuple[Launch, tuple[str, ...]]:
        tensors = [self.tensors.get(name) for name in names]
        written = self.tensors.get(names[-1])  # in float32, or in dweight's dtype
        key = (*key, *(t is None for t in tensors), None if written is None else written.dtype)
        aligned = layout.aligned(self.cols, strides, *tensors)
        return launching.prepare(kernel, self.device, grid, (*tensors, *rest), key, aligned, tile.warps), names


def _log(n: int) -> int:
    """Of a power of two."""
    return n.bit_length() - 1
