"""Rotary embedding after the norm, in plain PyTorch, and its transpose.

    o = n * cos + rotate_half(n) * sin,    n = norm(x), rounded to its dtype

`rotate_half` makes (-b, a) of a pair (a, b). In the computation dtype, rounded at the end; or, with `each`, in n's own
dtype, cos and sin rounded to it, as is every operation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rmsnorm.numerics.fixed_sum import compute_dtype

ROTARY_ROUNDINGS = ("once", "each")


class Rotation(NamedTuple):
    """Which pairs are rotated, and how.

    Attributes:
        dim: how many columns, from the first on; the others stay as they are.
        interleaved: whether a pair is (2 i, 2 i + 1), and not (i, i + dim / 2).
        each: whether every operation is rounded.
    """

    dim: int
    interleaved: bool = False
    each: bool = False


def rotate(n: Tensor, cos: Tensor, sin: Tensor, rotation: Rotation) -> Tensor:
    """n rotated, in its dtype. cos and sin have `dim` columns, or half of them, one for each pair."""
    return _turn(n, cos, sin, rotation, back=False)


def rotate_back(do: Tensor, cos: Tensor, sin: Tensor, rotation: Rotation) -> Tensor:
    """The gradient of n, of that of o: the transposed rotation, rounded as autograd rounds that of `rotate`."""
    return _turn(do, cos, sin, rotation, back=True)


def _turn(n: Tensor, cos: Tensor, sin: Tensor, rotation: Rotation, back: bool) -> Tensor:
    dtype = n.dtype if rotation.each else compute_dtype(n)
    turned, rest = n, None
    if rotation.dim != n.shape[-1]:
        turned, rest = n.split([rotation.dim, n.shape[-1] - rotation.dim], dim=-1)
    # Not by slices and signs: their gradients would add zeros, and -0 + 0 is 0.
    a, b = _pairs(turned.to(dtype), rotation)
    cos_a, cos_b = _angles(cos.to(dtype), rotation)
    sin_a, sin_b = _angles(sin.to(dtype), rotation)
    if back:
        first, second = a * cos_a + b * sin_b, b * cos_b - a * sin_a
    else:
        first, second = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    joined = torch.stack((first, second), -1) if rotation.interleaved else torch.cat((first, second), -1)
    o = joined.reshape(turned.shape).to(n.dtype)
    return o if rest is None else torch.cat((o, rest), -1)


def _pairs(t: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    if rotation.interleaved:  # by reshape: the older vmap has no rule for unflatten
        a, b = t.reshape(*t.shape[:-1], t.shape[-1] // 2, 2).unbind(-1)
    else:
        a, b = t.chunk(2, dim=-1)
    return a, b


def _angles(t: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    return _pairs(t, rotation) if t.shape[-1] == rotation.dim else (t, t)
