"""Norms with a gate, and norms over groups of the row: Mamba 2 and its kin, Falcon-H1, Qwen3-Next, Kimi-Linear."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rmsnorm import checks, dispatch
from rmsnorm.numerics import gated_reference, reference
from rmsnorm.ops import gated_autograd
from rmsnorm.ops.gated import operators

_ROUNDING_CODES = {name: index for index, name in enumerate(reference.ROUNDINGS)}
_ACTIVATION_CODES = {name: index for index, name in enumerate(gated_reference.ACTIVATIONS)}
_forward = operators.direct.gated_forward
# Function.apply, less what it does for functorch, which does not come this way.
_train = super(torch.autograd.Function, gated_autograd.GatedRMSNorm).apply
_compiling = torch.compiler.is_compiling
_functorch_active = torch._C._are_functorch_transforms_active
_straight = dispatch.straight
_grad_enabled = torch.is_grad_enabled


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
    try:
        code = _ACTIVATION_CODES[activation]
    except (KeyError, TypeError):
        code = checks.check_activation(activation)
    y = direct(x, gate, weight, eps, weight_offset, rounding, group_size, code, norm_before_gate)
    if y is not None:
        return y
    if checks.check_inputs(x, weight, None) != 1:
        shape = None if weight is None else tuple(weight.shape)
        raise ValueError(f"weight must have one dimension, got shape {shape}")
    checks.check_gate(gate, x)
    return normalize_groups(x, gate, weight, eps, weight_offset, rounding, group_size, code, norm_before_gate)


def direct(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float | None,
    weight_offset: float,
    rounding: str,
    group_size: int | None,
    activation: int = 0,
    norm_before_gate: bool = True,
) -> Tensor | None:
    """What is common, straight to the operator, whose own checks guard memory; None for what needs another look."""
    try:
        if (
            (gate is None or type(gate) is Tensor)
            and (group_size is None or type(group_size) is int)
            and type(norm_before_gate) is bool
            and _straight(x, weight, eps, weight_offset)
        ):
            cols = x.shape[-1] if group_size is None else group_size
            options = (eps, weight_offset, _ROUNDING_CODES[rounding], cols, activation, not norm_before_gate)
            if _grad_enabled() and (
                x.requires_grad
                or (gate is not None and gate.requires_grad)
                or (weight is not None and weight.requires_grad)
            ):
                return _train(x, gate, weight, *options)  # type: ignore[no-any-return]
            return _forward(x, gate, weight, *options)  # type: ignore[no-any-return]
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError):
        pass
    return None


def normalize_groups(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float | str | None,
    weight_offset: float,
    rounding: str,
    group_size: int | None,
    activation: int = 0,
    norm_before_gate: bool = True,
) -> Tensor:
    """y for tensors that fit together, every kind of them, gradients included; the gate is optional."""
    eps = checks.check_eps(eps, x.dtype)
    weight_offset = checks.check_weight_offset(weight_offset)
    code = checks.check_rounding(rounding)
    group_size = checks.check_group_size(group_size, x.shape[-1])
    norm_before_gate = bool(norm_before_gate)
    options = (eps, weight_offset, code, group_size, activation, not norm_before_gate)
    if dispatch.need_plain_operations(x, gate, weight):
        return gated_autograd.formula_of(x, gate, weight, options)
    result = gated_reference.result_dtype(x, gate, weight, reference.ROUNDINGS[code], norm_before_gate)
    if weight is not None and weight.dtype == torch.float64 != x.dtype:
        weight = weight.float()
    if _functorch_active():
        y, _ = gated_autograd.FunctorchGatedRMSNorm.apply(x, gate, weight, *options)
    elif _grad_enabled() and any(t is not None and t.requires_grad for t in (x, gate, weight)):
        if gate is x and _compiling():
            gate = x.view_as(x)  # the compiler takes no tensor twice
        y = gated_autograd.GatedRMSNorm.apply(x, gate, weight, *options)
    else:
        y = operators(x).gated_forward(x, gate, weight, *options)
    return y if y.dtype == result else y.to(result)  # type: ignore[no-any-return]


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
        checks.check_activation(activation)
        checks.check_rounding(rounding)
        checks.check_group_size(group_size, self.dim)
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
        from rmsnorm.patching import convert

        return convert.from_module(module, cls)

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
