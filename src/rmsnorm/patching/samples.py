"""Random rows for the proof, and a specimen's run on them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rmsnorm.patching.convention import Convention
from rmsnorm.patching.probes import SMALLEST_EPS
from rmsnorm.patching.specimen import Specimen

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Sample = dict[str, Tensor]
Pair = tuple[torch.dtype, torch.dtype | None]  # of x and the weight
# Magnitudes of the rows. float32 alone shows eps at work to the last bit: 16-bit squares of such rows would underflow
# in modules that take them.
_SCALES = (0.25, 1.0, 4.0)
_SCALES_BESIDE_EPS = (0.3, 1.0, 3.0)
_OUTLIER = 16.0


def row_shape(form: Convention) -> tuple[int, ...]:
    """The shape of a row; a form of any width is tried in one."""
    return form.shape or (form.group_size or 64,)


def sample(
    specimen: Specimen,
    form: Convention,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    scales: Sequence[float] = _SCALES,
    rows: int = 2,
) -> Sample:
    """Fresh random rows of several magnitudes, with a gate and a weight."""
    shape = row_shape(form)
    generator = torch.Generator().manual_seed(DTYPES.index(x_dtype) + 3 * len(shape))
    if x_dtype == torch.float32:
        # Below, a row of data would have to be all but zero, where forms that clamp the norm instead of adding eps
        # differ.
        low = max(form.eps or torch.finfo(torch.float32).eps, SMALLEST_EPS) ** 0.5
        scales = [*scales, *(factor * low for factor in _SCALES_BESIDE_EPS)]
    x = torch.randn(len(scales), rows, *shape, generator=generator)
    x.view(*x.shape[:2], -1)[0, 0, 1] *= _OUTLIER
    x *= torch.tensor(scales).view(-1, 1, *(1 for _ in shape))
    made = {"x": x}
    if form.activation is not None:
        made["gate"] = torch.randn(x.shape, generator=generator) * 3
    if weight_dtype is not None:
        # Both signs, and some that are nearly 1 or nearly no offset.
        weight = torch.randn(shape, generator=generator)
        weight.view(-1)[::3] = 1 - form.weight_offset + 0.02 * weight.view(-1)[::3]
        weight.view(-1)[1] = _OUTLIER
        made["weight"] = weight
    return cast(specimen, made, x_dtype, weight_dtype)


def cast(specimen: Specimen, made: Sample, x_dtype: torch.dtype, weight_dtype: torch.dtype | None) -> Sample:
    """The same on the specimen's device, in the dtypes of a pair."""
    dtypes = {"x": x_dtype, "gate": x_dtype, "weight": weight_dtype}
    return {name: t.to(specimen.device, dtypes[name]) for name, t in made.items()}


def run(specimen: Specimen, form: Convention, given: Sample, training: bool = False, grad: bool = False) -> Tensor:
    """The module's own result."""
    inputs = [given["x"], given["gate"]] if "gate" in given else [given["x"]]
    tensors = {}
    if form.weight is not None:
        tensors[form.weight] = given["weight"].view(specimen.tensors[form.weight].shape)
    return specimen.run(*inputs, tensors=tensors, training=training, grad=grad)


def same(a: Tensor, b: Tensor) -> bool:
    """To the bit, NaN included."""
    return a.dtype == b.dtype and bool(torch.equal(a, b) or ((a == b) | (a.isnan() & b.isnan())).all())
