"""Why a module is no RMSNorm, or is one only for now: what a report says of those left alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rmsnorm.patching.convention import Convention
from rmsnorm.patching.reason import OtherDimensions
from rmsnorm.patching.specimen import NotRMSNorm, Specimen

CLOSE = 1e-4
# Beside rows so large eps vanishes; beside tiny ones it is all that is left.
LARGE, TINY = 2.0**30, 1e-15


def check_constants(specimen: Specimen, form: Convention, x: Tensor, tensors: dict[str, Tensor]) -> None:
    """Numbers that training or loading may change have no part in it; but a buffer may hold eps."""
    gates = [] if form.activation is None else [torch.ones_like(x)]
    for name in specimen.constants:
        large, *smaller = (depends(specimen, name, (x * scale, *gates), tensors) for scale in (LARGE, 1.0, TINY))
        if not (large or any(smaller)):
            continue
        if name in specimen.unknown:
            raise NotRMSNorm(f"its {name} has no value on the meta device: patch once it has one", True)
        if large:
            raise unexpected(specimen, name)
        if name in specimen.learned:
            raise NotRMSNorm(f"its eps is learned: the parameter {name}", True)
        specimen.scalars.append(name)
    for name in tensors.keys() - specimen.constants.keys() - {form.weight}:
        if any(depends(specimen, name, (x * scale, *gates), tensors) for scale in (LARGE, 1.0, TINY)):
            raise unexpected(specimen, name)


def unexpected(specimen: Specimen, name: str) -> NotRMSNorm:
    """That a result depends on a tensor which is no weight."""
    kind = "neither a parameter nor a buffer" if name in specimen.attributes else "no weight of a row"
    return NotRMSNorm(f"its result depends on {name}, which is {kind}", True)


def depends(specimen: Specimen, name: str, inputs: tuple[Tensor, ...], tensors: dict[str, Tensor]) -> bool:
    """Whether a tensor has a part in the result, in training or out of it, at some value that it may take."""
    t = specimen.constants[name] if name in specimen.constants else tensors[name]
    for training in (False, True):
        own = specimen.run(*inputs, tensors=tensors, training=training)
        for other in _other_values(t):
            try:
                found = specimen.run(*inputs, tensors={**tensors, name: other}, training=training)
            except NotRMSNorm:
                return True
            if not torch.equal(own, found):
                return True
    return False


def _other_values(t: Tensor) -> list[Tensor]:
    """What training, loading or counting may make of it: a threshold may keep it without effect for now."""
    if t.dtype == torch.bool:
        return [~t, torch.zeros_like(t), torch.ones_like(t)]
    if not t.is_floating_point():
        largest = torch.iinfo(t.dtype).max
        return [torch.full_like(t, value) for value in (0, 1, 2, min(1000, largest), largest)] + [t + 1]
    moved = t * 1.5 + 1
    return [moved, -moved, *(torch.full_like(t, value) for value in (0.0, 1e3, -1e3))]


def of_other_dimensions(specimen: Specimen, tensors: dict[str, Tensor]) -> NotRMSNorm | None:
    """What a module normalises whose tensors lie across other dimensions than the last: the channels of images."""
    for name, t in tensors.items():
        sizes = tuple(t.shape)
        for shape in [(*sizes, *[1] * more) for more in (1, 2, 3)] if len(sizes) == 1 else [sizes]:
            generator = torch.Generator().manual_seed(5)
            x = torch.randn(2, *(size if size > 1 else 3 for size in shape), generator=generator).to(specimen.device)
            try:
                y, louder = (specimen.run(u, tensors=tensors) for u in (x, x * 4))
            except NotRMSNorm:
                continue
            if close(louder, y, 1e-2) and not close(y, x, 1e-2):
                across = "x".join(map(str, shape))
                if shape[-1] > 1:
                    return NotRMSNorm(f"its {name} of {across} differs between rows", True)
                return OtherDimensions("the channels that it normalises are not its input's last dimension", True)
    return None


def diagnose(run: Callable[[Tensor], Tensor], x: Tensor) -> NotRMSNorm:
    """Why a function of rows is no RMSNorm."""
    y = run(x)
    if not close(run(x * 4), y, 1e-2):
        return NotRMSNorm("it does not normalise")
    if close(run(x + 4), y, 1e-2):
        return NotRMSNorm("it subtracts the mean: a LayerNorm", True)
    added = run(-x) + y
    if float(added.abs().max()) > 1e-2 * float(y.abs().max()):
        constant = close(added, added[:1, :1].expand_as(added), 1e-2)
        return NotRMSNorm(f"it {'adds something, a bias' if constant else 'does more than scale: an activation'}", True)
    alone = run(x[:1, :1].expand_as(x).contiguous())[0, 0]
    if not close(alone, y[0, 0], 1e-2):
        return OtherDimensions("its statistics are taken over other dimensions than the last", True)
    return NotRMSNorm("its statistics are not the root mean square of its input", True)


def close(a: Tensor, b: Tensor, tolerance: float = CLOSE) -> bool:
    """Everywhere, in relation to the largest."""
    return bool((a - b).abs().max() <= tolerance * b.abs().max())
