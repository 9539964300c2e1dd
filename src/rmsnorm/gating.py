"""Norms with a gate, and norms over groups of the row: Mamba 2 and its kin, Falcon-H1, Qwen3-Next, Kimi-Linear."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rmsnorm import checks, gated_reference, reference, transforms


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    activation: str = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
) -> Tensor:
    """Root mean square normalisation of the last dimension, or of groups of it, multiplied by a gate.

        y = norm(x) * act(gate)    or, with norm_before_gate=False,    y = norm(x * act(gate))
        norm(u) = u / sqrt(mean(u^2) + eps) * (weight + weight_offset)

    >>> x, gate = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 100.0]])
    >>> gated_rms_norm(x, gate, activation="sigmoid")
    tensor([[0.4243, 1.1314]])

    Args:
        x: (*, d), float32, bfloat16, float16 or float64. Computed in float32 (float64 for float64), the gate included.
        gate: of x's shape and dtype.
        weight: (d,) in any of those dtypes. None means a gain of 1, and no offset is added.
        eps: any finite number, or text that reads as one; None means finfo(computation dtype).eps.
        activation: "silu" (Mamba 2, Qwen3-Next) or "sigmoid" (Kimi-Linear).
        norm_before_gate: False for Mamba 2 and its kin, whose gate is inside the norm.
        group_size: how many consecutive elements share their statistics; it divides d. None means all of them.
        weight_offset, rounding: as for `rms_norm`. Where the gate comes last, a rounding other than "once" also rounds
            the norm's result before the gate, and y has x's dtype.

    Raises:
        ValueError: shapes, devices or options that do not fit together.
        TypeError: arguments that are no dense floating-point tensors.

    Source: Dao and Gu, "Transformers are SSMs", 2024, and its `RMSNormGated`.
    """
    if checks.check_inputs(x, weight, None) != 1:
        shape = None if weight is None else tuple(weight.shape)
        raise ValueError(f"weight must have one dimension, got shape {shape}")
    checks.check_tensor(gate, "gate")
    for what in ("shape", "dtype", "device"):
        if getattr(gate, what) != getattr(x, what):
            raise ValueError(f"gate must have x's {what} {getattr(x, what)}, got {getattr(gate, what)}")
    if activation not in gated_reference.ACTIVATIONS:
        allowed = ", ".join(map(repr, gated_reference.ACTIVATIONS))
        raise ValueError(f"activation must be one of {allowed}, got {activation!r}")
    return normalize_groups(x, gate, weight, eps, weight_offset, rounding, group_size, activation, norm_before_gate)


def normalize_groups(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float | str | None,
    weight_offset: float,
    rounding: str,
    group_size: int | None,
    activation: str = "silu",
    norm_before_gate: bool = True,
) -> Tensor:
    """y for tensors that fit together, gradients included; the gate is optional."""
    options = (
        checks.check_eps(eps, x.dtype),
        checks.check_weight_offset(weight_offset),
        reference.ROUNDINGS[checks.check_rounding(rounding)],
        check_group_size(group_size, x.shape[-1]),
        activation,
        norm_before_gate,
    )
    if transforms.in_force() or any(transforms.dispatches_itself(t) for t in (x, gate, weight) if t is not None):
        return _formula(x, gate, weight, *options)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, gate, weight)):
        return _GatedRMSNorm.apply(x, gate, weight, *options)  # type: ignore[no-any-return]
    return gated_reference.forward(x, gate, weight, *options)[0]


def check_group_size(group_size: int | None, cols: int) -> int:
    """A positive integer that divides the row; None means the whole row."""
    if group_size is None:
        return cols
    if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1 or cols % group_size:
        raise ValueError(
            f"group_size must be a positive integer that divides the last dimension {cols}, got {group_size!r}"
        )
    return group_size


def _formula(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    rounding: str,
    group_size: int,
    activation: str,
    norm_before_gate: bool,
) -> Tensor:
    """The definition in ordinary differentiable operations, for what knows no others."""
    compute = reference.compute_dtype(x)
    u = x.to(compute)
    act = None
    if gate is not None:
        z = gate.to(compute)
        act = torch.sigmoid(z) if activation == "sigmoid" else z * torch.sigmoid(z)
    if act is not None and not norm_before_gate:
        u = u * act
    u = u.reshape(*u.shape[:-1], u.shape[-1] // group_size, group_size)
    y = (u * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    y = reference.round_x_hat(y, x, weight, rounding)
    if weight is not None:
        y = y * (weight.to(compute) + weight_offset)
    if act is not None and norm_before_gate:
        if rounding != "once":
            y = y.to(reference.result_dtype(x, weight, rounding)).to(compute)
        y = y * act
    return y.to(gated_reference.result_dtype(x, gate, weight, rounding, norm_before_gate))


class _GatedRMSNorm(torch.autograd.Function):
    """Saves x, the gate and one number per group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor | None, weight: Tensor | None, *options: Any) -> Tensor:
        y, rstd = gated_reference.forward(x, gate, weight, *options)
        ctx.save_for_backward(x, gate, weight, rstd)
        ctx.options = options
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight, rstd = ctx.saved_tensors
        _, weight_offset, _, group_size, activation, norm_before_gate = ctx.options
        if torch.is_grad_enabled():
            inputs = [t for t in (x, gate, weight) if t is not None and t.requires_grad]
            found = iter(torch.autograd.grad(_formula(x, gate, weight, *ctx.options), inputs, dy, create_graph=True))
            grads = [next(found) if t is not None and t.requires_grad else None for t in (x, gate, weight)]
        else:
            grads = list(
                gated_reference.backward(
                    dy, x, gate, rstd, weight, weight_offset, group_size, activation, norm_before_gate
                )
            )
        needed = [g if need else None for g, need in zip(grads, ctx.needs_input_grad[:3], strict=True)]
        return (*needed, *(None for _ in ctx.options))


class GatedRMSNorm(nn.Module):
    """Root mean square normalisation with a learned weight and a gate; see `gated_rms_norm`.

    >>> norm = GatedRMSNorm(8, group_size=4, norm_before_gate=False)
    >>> norm(torch.ones(2, 8), torch.zeros(2, 8)).shape
    torch.Size([2, 8])

    Args:
        dim: the last dimension.
        eps, activation, norm_before_gate, group_size, weight_offset, rounding: as for `gated_rms_norm`.
        elementwise_affine: whether there is a weight.
        device, dtype: of the parameter.

    Raises:
        ValueError: a dim or eps that is not positive, a group size that does not divide dim, an unknown option.
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        eps: float | None = 1e-6,
        *,
        elementwise_affine: bool = True,
        activation: str = "silu",
        norm_before_gate: bool = True,
        group_size: int | None = None,
        weight_offset: float = 0.0,
        rounding: str = "once",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        (self.dim,) = checks.check_shape(dim, "dim")
        self.eps = None if eps is None else checks.check_eps(eps)
        if self.eps is not None and self.eps <= 0:
            raise ValueError(f"eps must be positive, got {eps!r}")
        if activation not in gated_reference.ACTIVATIONS:
            allowed = ", ".join(map(repr, gated_reference.ACTIVATIONS))
            raise ValueError(f"activation must be one of {allowed}, got {activation!r}")
        checks.check_rounding(rounding)
        check_group_size(group_size, self.dim)
        self.elementwise_affine = elementwise_affine
        self.activation = activation
        self.norm_before_gate = norm_before_gate
        self.group_size = group_size
        self.weight_offset = checks.check_weight_offset(weight_offset)
        self.rounding = rounding
        if elementwise_affine:
            self.weight = nn.Parameter(torch.empty(self.dim, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)
        self.reset_parameters()

    @classmethod
    def from_module(cls, module: nn.Module) -> GatedRMSNorm:
        """The GatedRMSNorm that computes what another module computes; see `RMSNorm.from_module`."""
        from rmsnorm import conversion

        return conversion.from_module(module, cls)

    def reset_parameters(self) -> None:
        """The gain, weight + weight_offset, starts at one."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 0.0 if self.weight_offset == 1.0 else 1.0)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Y of x's shape (*, dim); the gate has it too."""
        return gated_rms_norm(
            x,
            gate,
            self.weight,
            self.eps,
            activation=self.activation,
            norm_before_gate=self.norm_before_gate,
            group_size=self.group_size,
            weight_offset=self.weight_offset,
            rounding=self.rounding,
        )

    def extra_repr(self) -> str:
        """The size, eps and every option that is not the default."""
        parts = [str(self.dim), f"eps={self.eps}"]
        defaults = {
            "elementwise_affine": True,
            "activation": "silu",
            "norm_before_gate": True,
            "group_size": None,
            "weight_offset": 0.0,
            "rounding": "once",
        }
        parts += [f"{name}={value!r}" for name, d in defaults.items() if (value := getattr(self, name)) != d]
        return ", ".join(parts)
