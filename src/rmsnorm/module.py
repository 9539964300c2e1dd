"""The norms as modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from rmsnorm import checked, checks
from rmsnorm.functional import add_rms_norm, gated_rms_norm, rms_norm
from rmsnorm.spec import check_eps, check_group_size, check_shape, make_spec

Self = TypeVar("Self", bound="Norm")


class Norm(nn.Module):
    """What all norms have in common: a shape, a weight, options, and how they are shown."""

    weight: nn.Parameter | None
    eps: float | None
    weight_offset: float
    _defaults: ClassVar[dict[str, Any]] = {}
    # What `from_module` is: rmsnorm.patching, which knows modules, puts it here; they know nothing of it.
    converter: ClassVar[Callable[..., Any]]

    def _set_up(
        self,
        shape: tuple[int, ...],
        eps: Any,
        options: dict[str, Any],
        flags: dict[str, bool],
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Checks the options once, keeps them as attributes, and makes the weight; flags say what the module does."""
        self.eps = None if eps is None else check_eps(eps)
        if self.eps is not None and self.eps <= 0:
            raise ValueError(f"eps must be positive, got {eps!r}")
        spec = make_spec(eps, **options)
        checks.check_dtype(dtype, "dtype")
        group_size = options["group_size"]
        if group_size is not None:
            check_group_size(group_size, torch.Size(shape).numel())
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {value!r}")
        for name, value in (options | flags).items():
            setattr(self, name, value)
        self.weight_offset = spec.weight_offset
        if flags["elementwise_affine"]:
            self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)
        self.reset_parameters()

    # PyTorch makes a new parameter, without the attributes of the old, where it copies, unpickles, moves or assigns.

    def _mark_weight(self) -> None:
        weight = self._parameters.get("weight")
        if weight is not None and hasattr(self, "sequence_parallel"):
            weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self._mark_weight()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark_weight()

    def _apply(self: Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._mark_weight()
        return self

    @classmethod
    def from_module(cls: type[Self], module: nn.Module) -> Self:
        """The norm of this class that computes what another module computes, found by running it (see `identify`).

        >>> RMSNorm.from_module(torch.nn.RMSNorm(64, eps=1e-5))
        RMSNorm(64, eps=1e-05)

        It holds the module's own parameter, and takes over its training mode.

        Raises:
            ValueError: the module is not recognised, and why; it has a gate and this class none, or the other way
                round; or it does not say its width.
        """
        return cls.converter(module, cls)  # type: ignore[no-any-return]

    def reset_parameters(self) -> None:
        """The gain, weight + weight_offset, starts at one."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 0.0 if self.weight_offset == 1.0 else 1.0)

    def _shape_text(self) -> str:
        raise NotImplementedError

    def extra_repr(self) -> str:
        """The size, eps and every option that is not the default."""
        changed = [f"{name}={value!r}" for name, d in self._defaults.items() if (value := getattr(self, name)) != d]
        return ", ".join([self._shape_text(), f"eps={self.eps}", *changed])


class RMSNorm(Norm):
    """Root mean square normalisation with a learned weight.

        y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset)

    >>> norm = RMSNorm(4)
    >>> norm(torch.tensor([1.0, -1.0, 1.0, -1.0])).detach()
    tensor([ 1.0000, -1.0000,  1.0000, -1.0000])
    >>> y, h = norm(torch.ones(2, 4), torch.ones(2, 4))  # with a residual: the norm of the sum, and the sum

    Args:
        dim: the trailing dimension to normalise over, or a shape of several.
        eps: a positive number, or text that reads as one; None means finfo(computation dtype).eps.
        elementwise_affine: whether there is a weight; without one the gain is 1, and no offset is added to it.
        weight_offset: added to the weight. With 1.0 the weight starts at zeros and means an offset from one (Gemma).
        rounding: "once", "before_scale" (Llama, Qwen) or "weight_dtype" (T5); see `rms_norm`.
        group_size: how many consecutive elements share their statistics; it divides dim. None means all of them.
        sum, alpha: of `add_rms_norm`, for calls with a residual.
        memory_efficient: training keeps y instead of x, which the next layer mostly keeps anyway. x is rebuilt from y,
            to within y's own rounding; where a gain is (nearly) zero x is kept after all. First derivatives only; not
            with groups.
        sequence_parallel: sets that attribute on the parameter, for trainers in the manner of Megatron.
        device, dtype: of the parameter.

    Raises:
        ValueError: a dim or eps that is not positive, an eps that is not finite, an unknown option.
        TypeError: an eps that is no number, a dtype that is not floating-point.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """

    rounding: str
    group_size: int | None
    sum: str
    alpha: float
    memory_efficient: bool
    sequence_parallel: bool
    _defaults: ClassVar[dict[str, Any]] = {
        "elementwise_affine": True,
        "weight_offset": 0.0,
        "rounding": "once",
        "group_size": None,
        "sum": "rounded",
        "alpha": 1.0,
        "memory_efficient": False,
        "sequence_parallel": False,
    }

    def __init__(
        self,
        dim: int | Sequence[int],
        eps: float | None = 1e-6,
        *,
        elementwise_affine: bool = True,
        weight_offset: float = 0.0,
        rounding: str = "once",
        group_size: int | None = None,
        sum: str = "rounded",  # noqa: A002 - as in add_rms_norm
        alpha: float = 1.0,
        memory_efficient: bool = False,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.normalized_shape = check_shape(dim, "dim")
        options = {"weight_offset": weight_offset, "rounding": rounding, "group_size": group_size}
        options |= {"sum": sum, "alpha": alpha}
        flags = {"elementwise_affine": elementwise_affine, "memory_efficient": memory_efficient}
        flags |= {"sequence_parallel": sequence_parallel}
        if memory_efficient and group_size is not None:
            raise ValueError("memory_efficient=True is not offered with group_size")
        self._set_up(self.normalized_shape, eps, options, flags, device, dtype)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Y of x's shape (*, dim); with a residual of that shape, y and h = x + residual."""
        weight = self.weight  # once: a module looks long for its parameters
        if residual is not None:
            return add_rms_norm(
                x,
                residual,
                weight,
                self.eps,
                weight_offset=self.weight_offset,
                rounding=self.rounding,
                normalized_shape=self.normalized_shape if weight is None else None,
                group_size=self.group_size,
                sum=self.sum,
                alpha=self.alpha,
            )
        if self.memory_efficient:
            return checked.rms_norm_keeping_y(
                x,
                weight,
                self.eps,
                weight_offset=self.weight_offset,
                rounding=self.rounding,
                normalized_shape=self.normalized_shape,
            )
        return rms_norm(
            x,
            weight,
            self.eps,
            weight_offset=self.weight_offset,
            rounding=self.rounding,
            normalized_shape=self.normalized_shape if weight is None else None,
            group_size=self.group_size,
        )

    def _shape_text(self) -> str:
        return str(self.normalized_shape[0] if len(self.normalized_shape) == 1 else self.normalized_shape)


class GatedRMSNorm(Norm):
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
        TypeError: an eps that is no number, a dtype that is not floating-point.
    """

    activation: str
    norm_before_gate: bool
    group_size: int | None
    rounding: str
    _defaults: ClassVar[dict[str, Any]] = {
        "elementwise_affine": True,
        "activation": "silu",
        "norm_before_gate": True,
        "group_size": None,
        "weight_offset": 0.0,
        "rounding": "once",
    }

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
        (self.dim,) = check_shape(dim, "dim")
        options = {"activation": activation, "norm_before_gate": norm_before_gate, "group_size": group_size}
        options |= {"weight_offset": weight_offset, "rounding": rounding}
        self._set_up((self.dim,), eps, options, {"elementwise_affine": elementwise_affine}, device, dtype)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Y of x's shape (*, dim); the gate has it too. Without a gate, the norm alone."""
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
            normalized_shape=None if self.elementwise_affine else self.dim,
        )

    def _shape_text(self) -> str:
        return str(self.dim)
