"""The class of a patched module: a subclass of its own class whose forward calls this library where a proof covers it.

Nothing is stored in the instance. The class is found again among the subclasses of the module's own class, which
remembers them as long as somebody uses them.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rmsnorm import functional
from rmsnorm.functional import plain
from rmsnorm.patching import layout
from rmsnorm.patching.convention import Convention
from rmsnorm.patching.dependencies import subclass
from rmsnorm.patching.watching import Watch

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_Parameter = nn.Parameter
_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled
_tracing = torch._C._get_tracing_state
_any_autocast = torch._C._is_any_autocast_enabled


class Proof:
    """What was proved of a module, and for what it holds.

    Args:
        convention: what it computes.
        watch: what that depends on in the module and around it.
        weight_shape: the shape in which the weight was proved; None without one.
        layout: of results whose input's dimensions were exchanged (see `layout.observed`), and on which device.
        device: its type.

    Attributes:
        pairs: the dtypes of input and weight that were tried.
        width: the size of the last dimension, if that is all of the row.
        unsquare: a size that no other dimension may have, where that was not tried.
        call: this library's call, of input, weight and gate.
    """

    def __init__(
        self, convention: Convention, watch: Watch, weight_shape: torch.Size | None, layout: str | None, device: str
    ) -> None:
        self.convention, self.watch, self.weight_shape = convention, watch, weight_shape
        self.layout, self.device = layout, device
        shape = convention.shape
        self.pairs = frozenset((e.x, e.weight) for e in convention.evidence)
        self.width = shape[0] if shape is not None and len(shape) == 1 and convention.dims is None else None
        self.unsquare = None if convention.square else self.width
        self.call: Callable[..., Tensor] = convention.apply if convention.dims is None else convention.apply_to_images
        if convention.activation is None and self.width is not None and weight_shape == shape:
            self.call = functools.partial(functional.rms_norm, eps=convention.eps, **convention.options)
            if convention.group_size is None and type(convention.eps) is float:
                self.call = plain.with_options(convention.eps, convention.weight_offset, convention.rounding)

    def __reduce__(self) -> Any:
        return Proof, (self.convention, self.watch, self.weight_shape, self.layout, self.device)

    def same_as(self, other: Proof) -> bool:
        """Whether both hold for the same modules and calls."""
        return (
            self.convention == other.convention
            and self.pairs == other.pairs
            and (self.convention.autocast, self.convention.square)
            == (other.convention.autocast, other.convention.square)
            and (self.weight_shape, self.layout, self.device) == (other.weight_shape, other.layout, other.device)
            and self.watch == other.watch
        )

    def covers(self, inputs: tuple[Any, ...], weight: Any) -> bool:
        """Whether it holds for a call: these inputs, this weight, and the modes that are on."""
        # In every call: exact types first, since isinstance asks PyTorch's metaclass, and nothing is looked up twice.
        x = inputs[0]
        if type(x) is not Tensor and not isinstance(x, Tensor):
            return False
        shape, dtype = x.shape, x.dtype
        if not shape or (shape[-1] != self.width and not self._covers_row(shape)):
            return False
        if weight is None:
            if self.weight_shape is not None or (dtype, None) not in self.pairs:
                return False
        elif (
            (type(weight) is not _Parameter and not isinstance(weight, Tensor))
            or weight.shape != self.weight_shape
            or (dtype, weight.dtype) not in self.pairs
        ):
            return False
        if len(inputs) > 1:
            gate = inputs[1]
            if not isinstance(gate, Tensor) or gate.dtype != dtype or gate.shape != shape:
                return False
        # Graphs of TorchScript and of ONNX are made of PyTorch's own operations.
        compiling = _compiling()
        if _tracing() is not None or ((compiling or _any_autocast()) and not self._covers_autocast(x.device.type)):
            return False
        if self.unsquare is not None and self.unsquare in shape[:-1]:
            return False
        # Tensors made in inference mode cannot be saved for a gradient; the module may not have to.
        if not compiling and _grad_enabled() and _any_inference(inputs, weight):
            return False
        return x.is_contiguous() or self._covers_layout(inputs)

    def _covers_autocast(self, device: str) -> bool:
        return device in self.convention.autocast or not torch.is_autocast_enabled(device)

    def _covers_row(self, shape: torch.Size) -> bool:
        row, group = self.convention.shape, self.convention.group_size
        if self.convention.dims is not None and row is not None:
            others = () if self.convention.square else (shape[0], *shape[2:])
            return len(shape) == self.convention.dims and shape[1] == row[0] and row[0] not in others
        if row is None:
            return shape[-1] > 0 and (group is None or shape[-1] % group == 0)
        return len(shape) >= len(row) and shape[-len(row) :] == row

    def _covers_layout(self, inputs: tuple[Any, ...]) -> bool:
        if all(map(layout.natural, inputs)):
            return True
        x = inputs[0]
        if self.layout is None or x.device.type != self.device:
            return False
        return 0 not in x.stride() and all(other.stride() == x.stride() for other in inputs)

    def arranged(self, y: Tensor, x: Tensor) -> Tensor:
        """The result of an input that is not contiguous, in the layout that the module gives it."""
        if self.layout == "input" and not layout.natural(x):
            return layout.in_order_of(y, x)
        return y.contiguous()


def patched_class(cls: type[nn.Module], proof: Proof) -> type[nn.Module]:
    """The subclass of cls in which a proof stands; the same for equal proofs."""
    for known in type.__subclasses__(cls):
        found = vars(known).get("_rmsnorm_proof")
        if found is not None and proof.same_as(found):
            return known
    body = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_rmsnorm_original": cls,
        "_rmsnorm_convention": proof.convention,
        "_rmsnorm_proof": proof,
        "extra_repr": _extra_repr,
        "__reduce_ex__": _reduce_ex,
    }
    made = subclass(cls, body)
    type.__setattr__(made, "forward", _forward(cls, proof, made))
    return made


def is_patched(module: nn.Module) -> bool:
    """Whether its forward is this library's."""
    return hasattr(type(module), "_rmsnorm_proof")


def _forward(cls: type[nn.Module], proof: Proof, made: type[nn.Module]) -> Callable[..., Any]:
    """The forward of `made`, the subclass of cls in which a proof stands."""
    covers, holds, call, arranged = proof.covers, proof.watch.holds, proof.call, proof.arranged
    count = 1 if proof.convention.activation is None else 2
    names = _input_names(cls, count)
    in_order = functools.partial(_in_order, names)
    weight_name = proof.convention.weight
    untouched = functools.partial(proof.watch.holds_in, made=made, aside=weight_name)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = args if not kwargs else in_order(args, kwargs)
        mine = type(self) is made
        if len(inputs) == count and (mine or untouched(type(self))) and holds(self):
            weight = None
            if weight_name is not None:
                if mine and weight_name not in self.__dict__:
                    weight = self._parameters.get(weight_name)
                if weight is None:  # a buffer, or what a sharder or a parametrization has put in its place
                    weight = getattr(self, weight_name, None)
            if covers(inputs, weight):
                y = call(inputs[0], weight, *inputs[1:])
                return y if inputs[0].is_contiguous() else arranged(y, inputs[0])
        return cls.forward(self, *args, **kwargs)

    # TorchScript compiles the source of the wrapped function with the globals of this one.
    own = cls.forward
    known = own.__globals__
    if own.__code__.co_freevars:
        known = {**known, **inspect.getclosurevars(own).nonlocals}
    function = types.FunctionType(forward.__code__, known, "forward", None, forward.__closure__)
    return functools.wraps(own)(function)


def _any_inference(inputs: tuple[Tensor, ...], weight: Tensor | None) -> bool:
    if inputs[0].is_inference() or (weight is not None and weight.is_inference()):
        return True
    return len(inputs) > 1 and inputs[1].is_inference()


def _input_names(cls: type[nn.Module], count: int) -> tuple[str, ...]:
    """By which keywords the inputs may be given; none if forward takes them in `*args`."""
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    return tuple(p.name for p in parameters if p.kind in _POSITIONAL)[:count]


def _in_order(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The inputs in order, if all keywords are among them; else none."""
    given = dict(zip(names, args, strict=False)) | kwargs
    return tuple(given[name] for name in names) if len(args) <= len(names) and set(given) == set(names) else ()


def _extra_repr(self: nn.Module) -> str:
    cls = type(self)._rmsnorm_original  # type: ignore[attr-defined]
    own = cls.extra_repr(self)
    return f"{own}{', ' if own else ''}rmsnorm: {type(self)._rmsnorm_convention}"  # type: ignore[attr-defined]


def _reduce_ex(self: nn.Module, protocol: Any) -> Any:
    """What the module's own class says, with that class in place of the patched one, which pickle could not find."""
    patched: Any = next(c for c in type(self).__mro__ if "_rmsnorm_proof" in vars(c))
    cls, proof = patched._rmsnorm_original, patched._rmsnorm_proof
    own = cls.__reduce_ex__(self, protocol)
    if type(self) is not patched or not isinstance(own, tuple):
        return own
    make, args, *rest = own
    return _restored, (proof, make, *(cls if a is patched else a for a in args)), *rest


def _restored(proof: Proof, make: Callable[..., nn.Module], *args: Any) -> nn.Module:
    """What pickle and copy make first of a patched module; its state follows."""
    made = make(*args)
    if type(made) is proof.watch.cls:
        object.__setattr__(made, "__class__", patched_class(type(made), proof))
    return made
