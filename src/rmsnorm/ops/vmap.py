"""`vmap` of the operators: to normalise a batch of inputs is to normalise one input with a dimension more.

Only a batch of weights, and a `dweight` for each sample, need a call for each sample. Both ways give the bits that the
samples have one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def rule(op: torch._ops.OpOverload) -> Callable[..., tuple[Any, Any]]:
    """The rule for `torch.library.register_vmap`."""
    names = [argument.name for argument in op._schema.arguments]
    defaults = [argument.default_value for argument in op._schema.arguments]

    def batched(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
        size = info.batch_size
        # The dispatcher leaves out what is as by default.
        given = dict(zip(names, [*args, *defaults[len(args) :]], strict=True))
        dims = dict(zip(names, [*in_dims, *[None] * (len(names) - len(args))], strict=True))
        for name, dim in dims.items():
            if dim is not None:
                given[name] = given[name].movedim(dim, 0)
        if dims["weight"] is not None or given.get("need_dweight"):
            if size == 0:  # one sample of nothing says what shape the results have
                given = {name: a if dims[name] is None else a.new_zeros(1, *a.shape[1:]) for name, a in given.items()}
            samples = [
                op(*(a if dims[name] is None else a[sample] for name, a in given.items()))
                for sample in range(max(1, size))
            ]
            if isinstance(samples[0], Tensor):
                return torch.stack(samples)[:size], 0
            stacked = [
                None if parts[0] is None else torch.stack(parts)[:size] for parts in zip(*samples, strict=True)
            ]
            return tuple(stacked), tuple(None if s is None else 0 for s in stacked)
        for name, value in given.items():
            if isinstance(value, Tensor) and name != "weight" and dims[name] is None:
                given[name] = value.expand(size, *value.shape)
        result = op(*given.values())
        if isinstance(result, Tensor):
            return result, 0
        return result, tuple(None if part is None else 0 for part in result)

    return batched
