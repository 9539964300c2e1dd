"""Norms of rows that a process group shares, for plain tensors: each rank has some columns of every row (Megatron).

With DTensors nothing of this is needed: `rms_norm` knows how they are sharded.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from rmsnorm import checks
from rmsnorm.distributed.split_rows import AllReduced, SplitNorm
from rmsnorm.module import RMSNorm
from rmsnorm.spec import NormSpec, make_spec


def hidden_sharded_rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    process_group: Any = None,
    hidden_size: int | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
) -> Tensor:
    """`rms_norm` of whole rows, of which this rank has some columns: the bits of one process, gradients included.

    A call exchanges 16 bytes a row (one MAX, one SUM), and its backward as much again.

    Args:
        x: (*, columns of this rank); the same rows on every rank.
        weight: this rank's part of it.
        process_group: the ranks that share each row; None means all.
        hidden_size: of the whole row; needed where ranks have different numbers of columns.
        eps, weight_offset, rounding: as for `rms_norm`.

    Raises:
        ValueError, TypeError: as `rms_norm`; and for a hidden_size below this rank's columns.
    """
    spec = make_spec(eps, dtype=x.dtype, weight_offset=weight_offset, rounding=rounding)
    y, _ = _normalize(x, None, weight, spec, process_group, hidden_size)
    return y


def hidden_sharded_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    process_group: Any = None,
    hidden_size: int | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
    sum: str = "rounded",  # noqa: A002 - as in add_rms_norm
    alpha: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` of whole rows, of which this rank has some columns; arguments as there and above."""
    spec = make_spec(eps, dtype=x.dtype, weight_offset=weight_offset, rounding=rounding, sum=sum, alpha=alpha)
    checks.check_residual(residual, x)
    y, h = _normalize(x, residual, weight, spec, process_group, hidden_size)
    assert h is not None  # noqa: S101 - for the type checker: a residual was given
    return y, h


class HiddenShardedRMSNorm(RMSNorm):
    """`RMSNorm` of rows that a process group shares; its weight is this rank's part.

    Args:
        dim: this rank's number of columns.
        process_group, hidden_size: as for `hidden_sharded_rms_norm`.
        eps, options: as for `RMSNorm`; without group_size and memory_efficient.
    """

    def __init__(
        self,
        dim: int,
        eps: float | None = 1e-6,
        *,
        process_group: Any = None,
        hidden_size: int | None = None,
        **options: Any,
    ) -> None:
        if refused := [name for name in ("group_size", "memory_efficient") if options.get(name)]:
            raise ValueError(f"{' and '.join(refused)} cannot be had where a row lies on several ranks")
        super().__init__(dim, eps, **options)
        self.process_group, self.hidden_size = process_group, hidden_size

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """This rank's columns of y; with a residual, of y and h."""
        given: dict[str, Any] = {"process_group": self.process_group, "hidden_size": self.hidden_size}
        given |= {"weight_offset": self.weight_offset, "rounding": self.rounding}
        if residual is None:
            return hidden_sharded_rms_norm(x, self.weight, self.eps, **given)
        given |= {"sum": self.sum, "alpha": self.alpha}
        return hidden_sharded_add_rms_norm(x, residual, self.weight, self.eps, **given)


def _normalize(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, spec: NormSpec, process_group: Any, hidden_size: Any
) -> tuple[Tensor, Tensor | None]:
    checks.check_inputs(x, weight, None)
    group = dist.group.WORLD if process_group is None else process_group
    if hidden_size is None:
        hidden_size = x.shape[-1] * dist.get_world_size(group)
    elif type(hidden_size) is not int or hidden_size < x.shape[-1]:
        raise ValueError(
            f"hidden_size must be an int of at least this rank's {x.shape[-1]} columns, got {hidden_size!r}"
        )
    return SplitNorm.apply(x, residual, None, weight, spec, AllReduced(hidden_size, [group]), [])  # type: ignore[no-any-return]
