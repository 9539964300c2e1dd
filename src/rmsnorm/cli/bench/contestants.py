"""Everything a user would pick for an RMSNorm, as far as it is installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor

import rmsnorm
from rmsnorm.cli.bench.shapes import Case
from rmsnorm.cli.bench.tensors import EPS, Inputs


class Unavailable(Exception):
    """A contestant cannot run this case; its message says why."""


@dataclass(frozen=True)
class Norm:
    """One implementation, made for the inputs of a case.

    Attributes:
        forward: y from x and weight.
        add: y and h from x, residual and weight, in one call; None if the sum is an operation of its own.
        differentiable: whether PyTorch can differentiate it.
        formula: what it is held to, RMSNorm or LayerNorm.
    """

    forward: Callable[[Tensor, Tensor], Tensor]
    add: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    differentiable: bool = True
    formula: str = "RMSNorm"


Maker = Callable[[Case, Inputs], Norm]


def ours(case: Case, inputs: Inputs) -> Norm:
    return Norm(
        lambda x, weight: rmsnorm.rms_norm(x, weight, EPS),
        lambda x, residual, weight: rmsnorm.add_rms_norm(x, residual, weight, EPS),
    )


def ours_out(case: Case, inputs: Inputs) -> Norm:
    out = torch.empty_like(inputs.x)
    return Norm(lambda x, weight: rmsnorm.rms_norm(x, weight, EPS, out=out))


def eager(case: Case, inputs: Inputs) -> Norm:
    return Norm(lambda x, weight: F.rms_norm(x, x.shape[-1:], weight, EPS))


def compiled(case: Case, inputs: Inputs) -> Norm:
    torch._dynamo.reset()

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, EPS)

    def add(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = x + residual
        return F.rms_norm(h, h.shape[-1:], weight, EPS), h

    return Norm(torch.compile(forward, dynamic=False), torch.compile(add, dynamic=False))


def layer_norm(case: Case, inputs: Inputs) -> Norm:
    bias = torch.zeros_like(inputs.weight)
    return Norm(lambda x, weight: F.layer_norm(x, x.shape[-1:], weight, bias, EPS), formula="LayerNorm")


def naive(case: Case, inputs: Inputs) -> Norm:
    """As models write it out, LlamaRMSNorm for one."""

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float() if x.dtype.itemsize < 4 else x
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)

    return Norm(forward)


def make_call(case: Case, inputs: Inputs, norm: Norm) -> Callable[[], tuple[Tensor, ...]]:
    """Return what is timed: the case's work by a contestant, which returns its results."""
    x, weight, residual, dy = inputs.x, inputs.weight, inputs.residual, inputs.dy
    if case.what == "forward":
        return lambda: (norm.forward(x, weight),)
    if case.what == "add":
        if norm.add is None:
            return lambda: (norm.forward(h := x + residual, weight), h)
        return lambda: norm.add(x, residual, weight)  # type: ignore[misc]  # it is not None, and nobody changes it
    if not norm.differentiable:
        raise Unavailable("forward only")
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    if case.what == "training":
        return lambda: torch.autograd.grad(norm.forward(*leaves), leaves, dy)
    # What torch.compile's backward gives back early would be missing the second time.
    with torch._functorch.config.patch(donated_buffer=False):
        y = norm.forward(*leaves)
        torch.autograd.grad(y, leaves, dy, retain_graph=True)
    return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)
