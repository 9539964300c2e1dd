"""`vmap` of the operators: to normalise a batch of inputs is to normalise one input with a dimension more.

Only a batch of weights, and a `dweight` for each sample, need a call for each sample. Both ways give the bits that the
samples have one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

# The older vmap, of `is_grads_batched` and `vectorize=True`; its name has no member in torch._C.DispatchKey.
WEIGHTS = ("weight", "next_weight")  # have one dimension, and no rows
_BATCHED: Any = torch._C._parse_dispatch_key("Batched")


def is_batched(t: Tensor | None) -> bool:
    return t is not None and bool(torch._C._dispatch_keys(t).has(_BATCHED))


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
        if any(dims.get(name) is not None for name in WEIGHTS) or given.get("need_dweight"):
            if size == 0:  # one sample of nothing says what shape the results have
                given = {name: a if dims[name] is None else a.new_zeros(1, *a.shape[1:]) for name, a in given.items()}
            samples = [
                op(*(a if dims[name] is None else a[sample] for name, a in given.items()))
                for sample in range(max(1, size))
            ]
            if isinstance(samples[0], Tensor):
                return torch.stack(samples)[:size], 0
            columns = list(zip(*samples, strict=True))
            results = tuple(None if parts[0] is None else torch.stack(parts)[:size] for parts in columns)
            return results, tuple(None if part is None else 0 for part in results)
        for name, value in given.items():
            if isinstance(value, Tensor) and name not in WEIGHTS and dims[name] is None:
                given[name] = value.expand(size, *value.shape)
        result = op(*given.values())
        if isinstance(result, Tensor):
            return result, 0
        # What nobody needs of `backward` is None and has no samples.
        return result, tuple(None if part is None else 0 for part in result)

    return batched


def older_rule(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """The same rule for the older vmap, whose own fallback takes no operator with optional results."""
    functorch_rule = rule(op)

    def batched(*args: Any) -> Any:
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()
        in_dims = [0 if isinstance(a, Tensor) and is_batched(a) else None for a in args]
        # A tensor that only an outer vmap has batched comes back with one sample.
        inner = [
            a if dim is None else torch._remove_batch_dim(a, level, 1, 0) for a, dim in zip(args, in_dims, strict=True)
        ]
        samples = [a.shape[0] for a, dim in zip(inner, in_dims, strict=True) if dim is not None]
        size = next((n for n in samples if n != 1), 1)
        inner = [a if dim is None else a.expand(size, *a.shape[1:]) for a, dim in zip(inner, in_dims, strict=True)]
        results, out_dims = functorch_rule(SimpleNamespace(batch_size=size), in_dims, *inner)
        if isinstance(results, Tensor):
            return torch._add_batch_dim(results, 0, level)
        return tuple(
            r if dim is None else torch._add_batch_dim(r, dim, level) for r, dim in zip(results, out_dims, strict=True)
        )

    return batched
