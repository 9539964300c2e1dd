"""`gated_rms_norm`: the norm with a gate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function

from rmsnorm import checked, dispatch
from rmsnorm.functional.fast_path import (
    ACTIVATION_INDEX,
    ROUNDING_INDEX,
    direct,
    grad_enabled,
    has_gpu,
    is_common,
    on_gpu,
    spec_of,
    train,
)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    activation: str = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
    normalized_shape: int | Sequence[int] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Root mean square normalisation of the last dimension, or of groups of it, multiplied by a gate.

        y = norm(x) * act(gate)    or, with norm_before_gate=False,    y = norm(x * act(gate))
        norm(u) = u / sqrt(mean(u^2) + eps) * (weight + weight_offset)

    >>> x, gate = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 100.0]])
    >>> gated_rms_norm(x, gate, activation="sigmoid")
    tensor([[0.4243, 1.1314]])

    Args:
        x: (*, d), float32, bfloat16, float16 or float64. Computed in float32 (float64 for float64), the gate included.
        gate: of x's shape and device, in a dtype of its own. None means no gate: the norm of `rms_norm`.
        weight, eps, weight_offset, normalized_shape, group_size, out: as for `rms_norm`.
        activation: "silu" (Mamba 2, Qwen3-Next) or "sigmoid" (Kimi-Linear).
        norm_before_gate: False for Mamba 2 and its kin, whose gate is inside the norm.
        rounding: as for `rms_norm`. Where the gate comes last, a rounding other than "once" also rounds the norm's
            result before the gate, and y has x's dtype.

    Raises:
        ValueError, TypeError: as `rms_norm`; and for a gate that does not match x.

    Source: Dao and Gu, "Transformers are SSMs", 2024, and its `RMSNormGated`.
    """
    if (
        (gate is None or type(gate) is Tensor)
        and is_common(x, weight, eps, weight_offset, rounding)
        and normalized_shape is None
        and out is None
        and (group_size is None or (type(group_size) is int and group_size > 0))
        and type(activation) is str
        and activation in ACTIVATION_INDEX
        and type(norm_before_gate) is bool
    ):
        fields = eps, weight_offset, ROUNDING_INDEX[rounding], group_size or 0, ACTIVATION_INDEX[activation]
        try:
            if grad_enabled() and (
                x.requires_grad
                or (gate is not None and gate.requires_grad)
                or (weight is not None and weight.requires_grad)
            ):
                x, gate, weight = dispatch.savable(x, gate, weight)
                spec = spec_of(eps, weight_offset, rounding, group_size, activation, not norm_before_gate)
                return train(x, None, gate, weight, spec)  # type: ignore[no-any-return]
            gated_forward = (on_gpu if has_gpu and x.is_cuda else direct).gated_forward
            return gated_forward(x, gate, weight, *fields, not norm_before_gate)  # type: ignore[no-any-return]
        except RuntimeError as error:
            refusal = error
        options: Any = {"weight_offset": weight_offset, "rounding": rounding, "group_size": group_size}
        checked.explain(refusal, (x, None, gate, weight, None), eps, **options)
    options = {"weight_offset": weight_offset, "rounding": rounding, "group_size": group_size}
    options |= {"activation": activation, "norm_before_gate": norm_before_gate}
    if checked.is_proxy(x):
        options |= {"normalized_shape": normalized_shape, "out": out}
        return handle_torch_function(gated_rms_norm, (x,), x, gate, weight, eps, **options)
    spec = checked.spec_of(x, eps, **options)
    if out is not None:
        return checked.write_out(out, x, gate, weight, spec, normalized_shape)
    return checked.normalize(x, None, gate, weight, spec, normalized_shape)[0]
