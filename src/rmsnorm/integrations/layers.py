"""Layers for a hub of kernels: a forward without state, for modules of other classes.

The module that receives it says what it computes: it is examined at its first call, as `patch` would, and what is
proved of it serves all modules of its class whose values are equal. Calls that the proof does not cover run the
module's own forward, and so do modules that are no RMSNorm.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rmsnorm.patching.identifying import prove_module
from rmsnorm.patching.patched import Proof, patched_class
from rmsnorm.patching.specimen import NotRMSNorm

# What modules were given, and for each module which of them: a number, which torch.compile can keep as a constant.
_forwards: list[Callable[..., Any]] = []
_chosen: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
_proofs: weakref.WeakKeyDictionary[type[nn.Module], list[Proof]] = weakref.WeakKeyDictionary()


class RMSNorm(nn.Module):
    """The forward of any norm of one input."""

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: Tensor) -> Any:
        return _forwards[_index_of(self)](self, hidden_states)


class RMSNormGated(nn.Module):
    """The forward of any norm of an input and a gate."""

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Any:
        return _forwards[_index_of(self)](self, hidden_states, gate)


@torch.compiler.assume_constant_result
def _index_of(module: nn.Module) -> int:
    found = _chosen.get(module)
    if found is None:
        forward = _examined(module)
        if forward not in _forwards:
            _forwards.append(forward)
        found = _chosen[module] = _forwards.index(forward)
    return found


def _examined(module: nn.Module) -> Callable[..., Any]:
    """This library's forward for modules like this one, or its class's own."""
    cls = type(module)
    known = _proofs.setdefault(cls, [])
    proof = next((proof for proof in known if _fits(proof, module)), None)
    if proof is None:
        stand_in = copy.copy(module)  # shares its tensors
        vars(stand_in).pop("forward", None)  # which the hub has put there
        try:
            proof = prove_module(stand_in)
        except NotRMSNorm:
            return cls.forward
        known.append(proof)
    return patched_class(cls, proof).forward


def _fits(proof: Proof, module: nn.Module) -> bool:
    name = proof.convention.weight
    weight = None if name is None else getattr(module, name, None)
    return proof.watch.holds(module) and getattr(weight, "shape", None) == proof.weight_shape
