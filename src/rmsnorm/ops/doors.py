"""Which operator computes a spec: the narrow one where it can, else the wide one.

`ops` is a choice of `library.operators(x)`; it is an argument so that a call asks once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rmsnorm.ops.library import operators
from rmsnorm.spec import NormSpec

Needed = tuple[bool, bool, bool]  # dx, dgate, dweight
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def forward(x: Tensor, gate: Tensor | None, weight: Tensor | None, spec: NormSpec) -> Tensor:
    """y."""
    ops = operators(x)
    if spec.partial:
        return ops.partial_forward(x, weight, *spec[:3], spec.partial)  # type: ignore[no-any-return]
    if gate is None and not spec.group_size:
        return ops.forward(x, weight, *spec[:3])  # type: ignore[no-any-return]
    return ops.gated_forward(x, gate, weight, *spec[:6])  # type: ignore[no-any-return]


def forward_train(x: Tensor, gate: Tensor | None, weight: Tensor | None, spec: NormSpec) -> tuple[Tensor, Tensor]:
    """y and rstd."""
    ops = operators(x)
    if spec.partial:
        return ops.partial_forward_train(x, weight, *spec[:3], spec.partial)  # type: ignore[no-any-return]
    if gate is None and not spec.group_size:
        if spec[1] == 0.0 and spec[2] == 0:  # a default passed costs 0.1 us
            return ops.forward_train(x, weight, spec[0])  # type: ignore[no-any-return]
        return ops.forward_train(x, weight, spec[0], spec[1], spec[2])  # type: ignore[no-any-return]
    return ops.gated_forward_train(x, gate, weight, *spec[:6])  # type: ignore[no-any-return]


def forward_out(x: Tensor, gate: Tensor | None, weight: Tensor | None, out: Tensor, spec: NormSpec) -> None:
    """Writes y to out."""
    ops = operators(x)
    if spec.partial:
        out.copy_(forward(x, gate, weight, spec))
    elif gate is None and not spec.group_size:
        ops.forward_out(x, weight, spec.eps, out, *spec[1:3])
    else:
        ops.gated_forward_out(x, gate, weight, *spec[:6], out)


def add_forward(x: Tensor, residual: Tensor, weight: Tensor | None, spec: NormSpec) -> tuple[Tensor, Tensor, Tensor]:
    """y, h and rstd."""
    ops = operators(x)
    if spec.plain_sum and residual.dtype == x.dtype:
        return ops.add_forward(x, residual, weight, *spec[:3])  # type: ignore[no-any-return]
    return ops.residual_forward(x, residual, weight, *spec[:4], *spec[6:8])  # type: ignore[no-any-return]


def backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    dh: Tensor | None,
    spec: NormSpec,
    needed: Needed,
    rebuilt_dtype: torch.dtype | None = None,
) -> Gradients:
    """dx, dgate and dweight, where needed; with `rebuilt_dtype`, x is y, and x in that dtype is rebuilt from it."""
    ops: Any = operators(rstd)  # the computation's dtype is rstd's: x may be y, which has another
    need_dx, need_dgate, need_dweight = needed
    if spec.partial:
        options: Any = spec.weight_offset, spec.partial, need_dx, need_dweight
        dx, dweight = ops.partial_backward(dy, x, rstd, weight, *options)
        return dx, None, dweight
    if gate is None and not spec.group_size:
        dx, dweight = ops.backward(dy, x, rstd, weight, spec.weight_offset, dh, rebuilt_dtype, need_dx, need_dweight)
        return dx, None, dweight
    options = spec.weight_offset, spec.group_size, spec.activation, spec.gate_first
    return ops.gated_backward(dy, x, gate, rstd, weight, dh, *options, need_dx, need_dgate, need_dweight)  # type: ignore[no-any-return]
