"""Which inputs tell the forms apart. Everything here is measured in float32, to about four digits; proof.py is exact.

A norm's result divided by its input is q = gain * rstd: constant over the elements of a row but for the gain, and over
the rows but for rstd. Large inputs give the gain, because eps vanishes beside them; tiny ones give eps, because it is
all that is left.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from rmsnorm.numerics import stages
from rmsnorm.patching.convention import Convention
from rmsnorm.patching.reasons import (
    CLOSE,
    LARGE,
    TINY,
    check_constants,
    close,
    depends,
    diagnose,
    of_other_dimensions,
    unexpected,
)
from rmsnorm.patching.specimen import NotRMSNorm, Specimen
from rmsnorm.spec import ACTIVATIONS

# A row of one element has no form: its norm is its sign.
SMALLEST_WIDTH = 2
# Weights of several dimensions are gains over heads; larger ones are matrices, and running them would take long.
LARGEST_MATRIX = 2**16
# Below, no row of data shows how eps enters.
SMALLEST_EPS = 1e-16
_WIDTH_WITHOUT_WEIGHT = 64
# A module without weights may have that many numbers; one of them is its width.
_MOST_SIZES = 8


def find_form(specimen: Specimen) -> Convention:
    """What the module computes in float32, its rounding not yet known.

    Raises:
        NotRMSNorm: it is none, and why.
    """
    generator = torch.Generator().manual_seed(len(specimen.tensors))
    tensors = {
        name: torch.empty(t.shape).uniform_(0.5, 1.5, generator=generator).to(specimen.device)
        for name, t in specimen.tensors.items()
        if t.numel() > 1
    }
    best: NotRMSNorm | None = None
    for shape in _row_shapes(specimen):
        x = probe(shape, generator, specimen.device)
        for measure in (_gated, _plain):
            try:
                found = measure(specimen, x, shape, tensors)
            except NotRMSNorm as reason:
                if best is None or (reason.normalises and not best.normalises):
                    best = reason
            else:
                if found is not None:
                    check_constants(specimen, found, x, tensors)
                    return found
    for name, t in specimen.constants.items():
        if best is not None and best.normalises and t.numel() > 1 and depends(specimen, name, (x,), tensors):
            best = unexpected(specimen, name)
    if best is None or not best.normalises:
        best = of_other_dimensions(specimen, tensors) or best
    raise best or NotRMSNorm("nothing in it has the size of a row")


def _row_shapes(specimen: Specimen) -> list[tuple[int, ...]]:
    """The shapes a row may have: those of its tensors, else sizes among its attributes, else any."""
    shapes: list[tuple[int, ...]] = []
    for t in specimen.tensors.values():
        shape = tuple(t.shape)
        while len(shape) > 1 and shape[0] == 1:
            shape = shape[1:]
        # A one inside the shape is a dimension that the weight is spread over: it is no part of a row.
        if t.numel() >= SMALLEST_WIDTH and (len(shape) == 1 or (t.numel() <= LARGEST_MATRIX and 1 not in shape)):
            shapes.append(shape)
    if not specimen.tensors:
        sizes = [size for size in specimen.sizes() if SMALLEST_WIDTH <= size <= LARGEST_MATRIX]
        shapes += [(size,) for size in [*sizes[:_MOST_SIZES], _WIDTH_WITHOUT_WEIGHT]]
    return list(dict.fromkeys(shapes))


def probe(shape: tuple[int, ...], generator: torch.Generator, device: torch.device) -> Tensor:
    """Two by three rows, no element near zero, every row and every group of another magnitude."""
    x = torch.empty(2, 3, *shape).uniform_(0.5, 1.5, generator=generator)
    x *= torch.empty(2, 3, *shape).uniform_(generator=generator).round() * 2 - 1
    scale = torch.arange(1.0, 7.0).view(2, 3, *(1 for _ in shape))
    return (x * scale).to(device)


def _gated(specimen: Specimen, x: Tensor, shape: tuple[int, ...], tensors: dict[str, Tensor]) -> Convention | None:
    """The form with the second input as a gate; None if it takes none, or ignores it."""
    if len(specimen.inputs) < 2:
        return None
    generator = torch.Generator().manual_seed(1)
    gates = [torch.empty(x.shape).uniform_(0.5, 2.0, generator=generator).to(x.device) for _ in range(2)]
    try:
        first, second = (specimen.run(x, gate, tensors=tensors) for gate in gates)
    except NotRMSNorm:
        return None
    if close(first, second):
        return None
    reason: NotRMSNorm | None = None
    for activation, last in product(ACTIVATIONS, (True, False)):
        act = stages.activate(gates[0], ACTIVATIONS.index(activation), torch.float32)[0]

        def ungated(u: Tensor, act: Tensor = act, last: bool = last) -> Tensor:
            if last:
                return specimen.run(u, gates[0], tensors=tensors) / act
            return specimen.run(u / act, gates[0], tensors=tensors)

        try:
            form = _measure(ungated, specimen, x, shape, tensors)
        except NotRMSNorm as error:
            reason = error
            continue
        return Convention(**{**form, "activation": activation, "norm_before_gate": last})
    raise NotRMSNorm("its second input is no silu or sigmoid gate", normalises=bool(reason and reason.normalises))


def _plain(specimen: Specimen, x: Tensor, shape: tuple[int, ...], tensors: dict[str, Tensor]) -> Convention:
    form = _measure(lambda u: specimen.run(u, tensors=tensors), specimen, x, shape, tensors)
    if form["weight"] is None:
        form["shape"] = _shape_of_any(specimen, shape)
    return Convention(**form)


def _shape_of_any(specimen: Specimen, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Without a tensor that scales, the width is any, if another one runs."""
    other = probe((shape[-1] + 2,), torch.Generator().manual_seed(3), specimen.device)
    try:
        specimen.run(other)
    except NotRMSNorm:
        return shape
    return None


def _measure(
    run: Callable[[Tensor], Tensor],
    specimen: Specimen,
    x: Tensor,
    shape: tuple[int, ...],
    tensors: dict[str, Tensor],
) -> dict[str, Any]:
    """Groups, gain and eps of a function of x alone."""
    group, weight, offset, gain, mean_square = measure_gain(run, x, shape, tensors)
    rows, width = mean_square.shape
    tiny = run(x * TINY).double().reshape(rows, width) / (x * TINY).double().reshape(rows, width)
    eps, eps_name = _eps(gain, tiny, mean_square * TINY**2, specimen, run, x)
    return {
        "shape": shape,
        "weight": weight,
        "eps": eps,
        "eps_name": eps_name,
        "weight_offset": offset,
        "group_size": None if group == width else group,
    }


def measure_gain(
    run: Callable[[Tensor], Tensor], x: Tensor, shape: tuple[int, ...], tensors: dict[str, Tensor]
) -> tuple[int, str | None, float, Tensor, Tensor]:
    """What large rows show: the size of the groups, the weight's name and offset, the gain, each mean square of x.

    Raises:
        NotRMSNorm: it is no function of the root mean square, or the gain is no weight plus a constant.
    """
    large = run(x * LARGE)
    q = (large.double() / (x * LARGE).double()).flatten(0, 1)  # (6, *shape)
    rows, width = q.shape[0], x[0, 0].numel()
    q = q.reshape(rows, width)
    if not q.isfinite().all():
        raise NotRMSNorm("its result is not finite for ordinary inputs")
    group = _group_size(q, shape)
    if group is None:
        raise diagnose(run, x)
    wide = x.double().reshape(rows, width // group, group)
    mean_square = wide.square().mean(-1, keepdim=True).expand_as(wide).reshape(rows, width)
    gains = q * mean_square.sqrt() * LARGE
    gain = gains.mean(0)
    if not close(gains, gain.expand_as(gains)):
        raise diagnose(run, x)
    weight, offset = _match(gain, tensors)
    return group, weight, offset, gain, mean_square


def _group_size(q: Tensor, shape: tuple[int, ...]) -> int | None:
    """The longest groups within which all rows differ by one factor; None if there is none of two elements."""
    ratio = q[1:] / q[:1]
    width = ratio.shape[-1]
    sizes = [width // n for n in range(1, width // SMALLEST_WIDTH + 1) if width % n == 0]
    for size in sizes:
        groups = ratio.view(-1, width // size, size)
        spread = groups.amax(-1) - groups.amin(-1)
        if bool((spread <= CLOSE * groups.abs().amax(-1)).all()):
            return size
    return None


def _match(gain: Tensor, tensors: dict[str, Tensor]) -> tuple[str | None, float]:
    """Whose values the gain has, and what is added to them."""
    for name, t in tensors.items():
        if t.numel() != gain.numel():
            continue
        value = t.double().flatten()
        offset = (gain - value).mean()
        if close(gain, value + offset):
            nearest = round(float(offset), 3)
            return name, nearest if abs(nearest - float(offset)) < CLOSE else float(offset)
        factor = (gain / value).mean()
        if close(gain, value * factor):
            raise NotRMSNorm(f"it multiplies by {factor:.6g} besides the weight {name!r}{_l2(factor, gain)}", True)
    factor = gain.mean()
    if not close(gain, factor.expand_as(gain)):
        raise NotRMSNorm("what it multiplies by is none of its parameters and buffers, plus a constant", True)
    if not close(factor, torch.ones_like(factor)):
        raise NotRMSNorm(f"it multiplies by {factor:.6g} where an RMSNorm has 1{_l2(factor, gain)}", True)
    return None, 0.0


def _l2(factor: Tensor, gain: Tensor) -> str:
    return ": an L2 normalisation" if abs(float(factor) * gain.numel() ** 0.5 - 1.0) < CLOSE else ""


def _eps(
    gain: Tensor, q: Tensor, mean_square: Tensor, specimen: Specimen, run: Callable[[Tensor], Tensor], x: Tensor
) -> tuple[float | None, str | None]:
    """Eps, from rows so small that it is nearly all of mean(x^2) + eps, and the name of the attribute that holds it."""
    measured = (gain / q).square() - mean_square
    eps = float(measured.median())
    if not bool(measured.isfinite().all()) or float((measured - eps).abs().max()) > 1e-3 * abs(eps) + float(
        mean_square.max()
    ):
        raise NotRMSNorm("tiny rows are not divided by one constant: its eps is not inside the square root", True)
    if eps <= 1e-3 * float(mean_square.min()):
        # Its own rounding hides eps from 0: zeros tell them apart.
        finite = bool(run(torch.zeros_like(x)).isfinite().all())
        return (float(torch.finfo(torch.float32).tiny) if finite else 0.0), None
    if eps >= SMALLEST_EPS:
        # Where both terms count, a clamp or an eps beside the root shows.
        scale = (eps / float(x.square().mean())) ** 0.5
        both = run(x * scale).double().reshape(q.shape) / (x * scale).double().reshape(q.shape)
        if not close(both, gain * (mean_square / TINY**2 * scale**2 + eps).rsqrt(), 1e-3):
            raise NotRMSNorm("its eps is not added inside the square root", True)
    named = {name: value for name, value in specimen.numbers().items() if abs(value - eps) <= 1e-3 * eps}
    if named:
        name = min(named, key=lambda name: abs(named[name] - eps))
        return named[name], name
    if abs(eps - torch.finfo(torch.float32).eps) <= 1e-3 * eps and specimen.attribute("eps") is None:
        return None, "eps" if specimen.has("eps") else None
    for digits in range(3):
        short = float(f"{eps:.{digits}e}")
        if abs(short - eps) <= 1e-4 * eps:
            return short, None
    return eps, None
