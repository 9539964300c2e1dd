"""Which modules take a norm's result, found by running the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Uses(TorchDispatchMode):
    """Follows the results of norms through one run: the linear layers that take them, and what else does.

    Attributes:
        linear: for each norm the linear layers that took its result.
        others: for each norm what else did, if something.
        mixed: the linear layers that also took something else, by name.
    """

    def __init__(self, norms: Mapping[str, nn.Module], linears: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.linear: dict[str, list[str]] = {name: [] for name in norms}
        self.others: dict[str, str] = {}
        self.mixed: set[str] = set()
        self._made: dict[int, tuple[str, Tensor]] = {}  # by storage; the tensors are kept, so that it is not reused
        self._inside: list[str] = []
        self._handles: list[Any] = []
        for name, module in norms.items():
            self._handles.append(module.register_forward_pre_hook(self._entering(name)))
            self._handles.append(module.register_forward_hook(self._left(name)))
        for name, module in linears.items():
            self._handles.append(module.register_forward_pre_hook(self._taken(name)))
            self._handles.append(module.register_forward_hook(lambda *_: self._inside.pop() and None))

    def run(self, model: nn.Module, arguments: Iterable[Any], keywords: dict[str, Any]) -> Any:
        """The model's result."""
        try:
            with torch.no_grad(), self:
                y = model(*arguments, **keywords)
        finally:
            for handle in self._handles:
                handle.remove()
        for t in _tensors(y):
            self._note(t, "the model's result")
        return y

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        view = function.is_view or function._schema.name in ("aten::detach", "aten::_unsafe_view", "aten::alias")
        if not self._inside and not view:
            for t in _tensors((args, kwargs)):
                self._note(t, function._schema.name)
        return function(*args, **(kwargs or {}))

    def _note(self, t: Tensor, who: str) -> None:
        if (made := self._made.get(_storage(t))) is not None:
            self.others.setdefault(made[0], who)

    def _entering(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            for t in _tensors(args):  # the result of another norm
                self._note(t, f"the norm {name}")
            self._inside.append(name)

        return hook

    def _left(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, y: Any) -> None:
            self._inside.pop()
            for t in _tensors(y):
                self._made[_storage(t)] = name, t

        return hook

    def _taken(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            self._inside.append(name)
            made = self._made.get(_storage(args[0])) if len(args) == 1 else None
            if made is None:
                self.mixed.add(name)
            elif name not in self.linear[made[0]]:
                self.linear[made[0]].append(name)

        return hook


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


def _storage(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)
