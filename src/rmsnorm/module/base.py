"""Norm: the base of all modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from rmsnorm import checks
from rmsnorm.spec import check_eps, check_group_size, make_spec

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
        group_size = options.get("group_size")
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

    def _mark_parameters(self) -> None:
        for parameter in self._parameters.values():
            if parameter is not None and hasattr(self, "sequence_parallel"):
                parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self._mark_parameters()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark_parameters()

    def _apply(self: Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._mark_parameters()
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
