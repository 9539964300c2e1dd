"""The call cache: calls like an earlier one go straight to the launch.

A call on a GPU is often over before the host has made the next, so that a small model waits for the host. Whatever an
operator decides for tensors of the same dtypes, shapes, strides, alignment and device, and the same options, is stored
as a `PreparedCall`; and where PyTorch's dispatcher would do nothing but call the operator, it is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

# A server sees ever new shapes. A prepared call is a few kilobytes, and is made again in 20 to 30 us.
MOST = 4096

Maker = Callable[[Tensor], Tensor]
# A launch of a kernel, and the names of the tensors that it takes; what is absent has the name "".
Step = tuple[Callable[..., None], tuple[str, ...]]


class PreparedCall:
    """A call of an operator with everything decided but where its tensors are: makes memory, and launches.

    Args:
        parameters: the names of the operator's arguments.
        made: what makes results, and memory between launches, from the argument x.
        steps: launches, one after another; they name arguments and what is made.
        results: the names of what the operator returns.
        guard: of its arguments, whether it may be used again; None: always.
    """

    __slots__ = ("_makers", "_results", "_steps", "_x", "guard")

    def __init__(
        self,
        parameters: tuple[str, ...],
        made: dict[str, Maker],
        steps: list[Step],
        results: tuple[str, ...],
        guard: Callable[[tuple[Any, ...]], bool] | None = None,
    ) -> None:
        # Arguments are last: those at their end may be left to their defaults.
        at = {name: number for number, name in enumerate((*made, "", *parameters))}
        self._makers = tuple(made.values())
        self._steps = tuple((launch, itemgetter(*(at[name] for name in names))) for launch, names in steps)
        self._results = itemgetter(*(at[name] for name in results))
        self._x = parameters.index("x")
        self.guard = guard

    def __call__(self, *arguments: Any) -> Any:
        x = arguments[self._x]
        tensors = (*[make(x) for make in self._makers], None, *arguments)
        for launch, pick in self._steps:
            launch(*pick(tensors))
        return self._results(tensors)


_calls: dict[Any, PreparedCall] = {}
clear = _calls.clear
size = _calls.__len__


def lookup(name: str, arguments: tuple[Any, ...]) -> PreparedCall | None:
    """The prepared call of an operator for such arguments, if there is one."""
    prepared = _calls.get(_key(name, arguments))
    if prepared is not None and prepared.guard is not None and not prepared.guard(arguments):
        return None
    return prepared


def store(name: str, arguments: tuple[Any, ...], prepared: PreparedCall) -> None:
    """For calls like this one, if its tensors are memory, and not of subclasses, which may want to see calls."""
    tensors = [a for a in arguments if isinstance(a, Tensor)]
    if all(type(t) in _PLAIN and not t.is_neg() and (t.data_ptr() or t.numel() == 0) for t in tensors):
        if len(_calls) >= MOST:
            _calls.clear()
        _calls[_key(name, arguments)] = prepared


_PLAIN = Tensor, torch.nn.Parameter
# The vmap of functorch is a mode, and seen as one.
_is_older_batch = torch._C._functorch.is_legacy_batchedtensor


def _key(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return name, *[_kind(a) if isinstance(a, Tensor) else a for a in arguments]


def _kind(t: Tensor) -> tuple[Any, ...]:
    """What a prepared call depends on.

    Tensors that are more than memory, or have lost theirs, are of no kind that is stored: they have no address (zeros),
    none that may be asked for (nested and batched ones), or are negated when read.
    """
    if t.is_nested or _is_older_batch(t):
        return ()
    address = t.data_ptr()
    return type(t), t.dtype, t.shape, t.stride(), t.device, address % 16 if address else t.numel(), t.is_neg()


# ---------------------------------------------------------------- without the dispatcher

_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_functorch_active, _tracing = torch._C._are_functorch_transforms_active, torch._C._get_tracing_state
_profiler = torch.autograd.profiler


def _observed() -> bool:
    """Whether a mode, transform, profiler or tracer is to see calls."""
    modes = _dispatch_modes() or _function_modes() or _functorch_active()
    return bool(modes or _profiler._is_profiler_enabled or _tracing())


def fast(dispatched: SimpleNamespace) -> SimpleNamespace:
    """The operators, called without the dispatcher where there is a prepared call."""
    return SimpleNamespace(**{name: _fast(name, operator) for name, operator in vars(dispatched).items()})


# How many arguments the operators have of which the last two, weight_offset and rounding, may be left out.
_COUNTS = {"forward": 5, "forward_train": 5, "forward_out": 6, "add_forward": 6}
_DEFAULTS = 0.0, 0


def _fast(name: str, dispatched: Callable[..., Any]) -> Callable[..., Any]:
    count = _COUNTS.get(name, 0)

    def call(*arguments: Any) -> Any:
        if not _observed():
            if len(arguments) < count:
                arguments = *arguments, *_DEFAULTS[len(arguments) - count :]
            prepared = lookup(name, arguments)
            if prepared is not None:
                return prepared(*arguments)
        return dispatched(*arguments)

    return call
