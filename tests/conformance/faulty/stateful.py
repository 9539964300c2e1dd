"""RMSNorms that are right on one ordinary call, and wrong by size, or by what calls leave behind."""

from typing import ClassVar

import torch
from torch import nn

from tests.conformance.faulty.formula import right

# Sizes.


def rows_after_the_grid_are_zero(x, weight, eps=1e-6):
    """One block per row, in a dimension of a grid that ends at 65,535."""
    y = right(x, weight, eps)
    return torch.cat([y[:65_535], torch.zeros_like(y[65_535:])]) if x.dim() == 2 and len(x) > 65_535 else y


class _DxOfTheFirstRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return right(x, weight, eps)

    @staticmethod
    def backward(ctx, dy):
        dx, dweight = _gradients(*ctx.saved_tensors, ctx.eps, dy)
        dx.flatten(0, -2)[65_535:] = 0
        return dx, dweight, None


def dx_after_the_grid_is_zero(x, weight, eps=1e-6):
    return _DxOfTheFirstRows.apply(x, weight, eps)


def mean_of_the_first_block(x, weight, eps=1e-6):
    """A row in one block of at most 65,536 elements."""
    wide = x.double()
    mean = wide[..., :65_536].square().sum(-1, keepdim=True) / x.shape[-1]
    return (wide * torch.rsqrt(mean + eps) * weight.double()).to(x.dtype)


# Between a forward and its backward.


def _gradients(x, weight, eps, dy):
    with torch.enable_grad():
        leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
        return torch.autograd.grad(right(*leaves, eps), leaves, dy)


def _formula_gradients(x, weight, rstd, dy):
    wide, u = x.double() * rstd, dy.double() * weight.double()
    dx = rstd * (u - wide * (u * wide).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dy.double() * wide).flatten(0, -2).sum(0).to(weight.dtype)


class _Stateful(torch.autograd.Function):
    """A forward and a backward with state that is the class's."""

    rstd: ClassVar = {}
    dx: ClassVar = {}
    partial_sums = torch.zeros(0)

    @staticmethod
    def forward(ctx, x, weight, eps, way):
        ctx.eps, ctx.way = eps, way
        if way == "detached x":
            ctx.x = x.detach()
            ctx.save_for_backward(weight)
        elif way == "detached weight":
            ctx.weight = weight.detach()
            ctx.save_for_backward(x)
        else:
            ctx.save_for_backward(x, weight)
        _Stateful.rstd[x.shape] = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps)
        return right(x, weight, eps)

    @staticmethod
    def backward(ctx, dy):
        if ctx.way == "detached x":
            x, (weight,) = ctx.x, ctx.saved_tensors
        elif ctx.way == "detached weight":
            (x,), weight = ctx.saved_tensors, ctx.weight
        else:
            x, weight = ctx.saved_tensors
        dx, dweight = _gradients(x, weight, ctx.eps, dy)
        if ctx.way == "statistics of the class":
            dx, dweight = _formula_gradients(x, weight, _Stateful.rstd[x.shape], dy)
        elif ctx.way == "one dx":
            dx = _Stateful.dx.setdefault((x.shape, x.dtype), torch.empty_like(x)).copy_(dx)
        elif ctx.way == "sums not cleared":
            rows, width = dy.flatten(0, -2), dy.shape[-1]
            if _Stateful.partial_sums.shape[-1:] != (width,) or len(_Stateful.partial_sums) < len(rows):
                _Stateful.partial_sums = torch.zeros(len(rows), width, dtype=torch.float64)
            rstd = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + ctx.eps)
            _Stateful.partial_sums[: len(rows)] = (dy.double() * x.double() * rstd).flatten(0, -2)
            dweight = _Stateful.partial_sums.sum(0).to(weight.dtype)
        elif ctx.way == "frozen weight":
            dx = dx if ctx.needs_input_grad[1] else None
        elif ctx.way == "frozen x":
            dweight = dweight if ctx.needs_input_grad[0] else None
        return dx, dweight, None, None


def _stateful(way):
    def norm(x, weight, eps=1e-6):
        return _Stateful.apply(x, weight, eps, way)

    norm.__name__ = way.replace(" ", "_")
    return norm


backward_reads_the_latest_statistics = _stateful("statistics of the class")
dx_in_one_buffer = _stateful("one dx")
dweight_sums_not_cleared = _stateful("sums not cleared")
x_saved_without_its_version = _stateful("detached x")
weight_saved_without_its_version = _stateful("detached weight")
frozen_weight_loses_dx = _stateful("frozen weight")
frozen_x_loses_dweight = _stateful("frozen x")


def frozen_weight_cuts_the_graph(x, weight, eps=1e-6):
    """Trained means that the weight is."""
    return right(x, weight, eps) if weight.requires_grad else right(x.detach(), weight, eps)


_trained = {}


def mode_of_the_first_call(x, weight, eps=1e-6):
    """Whether there is a graph is decided once for every dtype, in a kernel for rows of 256."""
    trained = x.shape[-1] != 256 or _trained.setdefault(x.dtype, x.requires_grad)
    return right(x, weight, eps) if trained else right(x.detach(), weight.detach(), eps)


# Weights.

_by_address, _by_width, _by_version = {}, {}, {}


def gain_by_address(x, weight, eps=1e-6):
    """A gain for every address, kept with its weight, so that no chance gives the address to another."""
    key = weight.data_ptr(), weight.numel(), weight.dtype
    if x.requires_grad or weight.requires_grad:
        return right(x, weight, eps)
    return right(x, _by_address.setdefault(key, (weight.detach().clone(), weight))[0], eps)


def gain_by_version(x, weight, eps=1e-6):
    """The same, until autograd's counter says that it was written."""
    if x.requires_grad:
        return right(x, weight, eps)
    key = weight.data_ptr(), weight.numel(), weight.dtype, weight._version
    return right(x, _by_version.setdefault(key, (weight.detach().clone(), weight))[0], eps)


def gain_of_the_first_norm(x, weight, eps=1e-6):
    """One gain for every width."""
    if torch.is_grad_enabled():
        return right(x, weight, eps)
    return right(x, _by_width.setdefault((weight.numel(), weight.dtype), weight.detach().clone()), eps)


class GainOfTheFirstCall(nn.Module):
    """A gain that is made once, and copied with the module."""

    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps, self.gain = eps, None

    def forward(self, x):
        if torch.is_grad_enabled():
            return right(x, self.weight, self.eps)
        if self.gain is None:
            self.gain = self.weight.detach().double()
        return right(x, self.gain, self.eps)


# Sequences of calls.

_rows, _epsilons, _dtypes, _statistics, _plans = {}, {}, {}, {}, {}


def few_rows_of_the_first_call(x, weight, eps=1e-6):
    """A kernel for rows of 256, launched with as many blocks as its first call needed."""
    y = right(x, weight, eps)
    if x.dim() != 2 or x.requires_grad or x.shape[-1] != 256:
        return y
    blocks = _rows.setdefault(x.dtype, -(-len(x) // 32))
    return torch.cat([y[: blocks * 32], torch.zeros_like(y[blocks * 32 :])])


def width_by_the_number_of_elements(x, weight, eps=1e-6):
    """A plan for every number of elements, with the width of the first that came."""
    width = _plans.setdefault((x.numel(), x.dtype), x.shape[-1])
    wide = x.double()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) / width + eps) * weight.double()).to(x.dtype)


def eps_of_the_first_norm(x, weight, eps=1e-6):
    """One eps for every width and dtype, if there are a few rows."""
    used = _epsilons.setdefault((x.shape[-1], x.dtype), eps) if len(x) > 2 and x.shape[-1] > 64 else eps
    return right(x, weight, used)


def dtype_of_the_first_call(x, weight, eps=1e-6):
    """The dtype of the result is that which 300 rows of 256 had first."""
    y = right(x, weight, eps)
    if x.dim() != 2 or x.shape[-1] != 256 or len(x) != 300 or x.requires_grad:
        return y
    return y.to(_dtypes.setdefault(x.shape[-1], x.dtype))


def statistics_by_address(x, weight, eps=1e-6):
    """A root mean square for every address of x, kept while its version says that nothing was written."""
    if x.requires_grad or x.dim() != 2:
        return right(x, weight, eps)
    key = x.data_ptr(), x.shape, x.stride(), x._version
    held, rstd = _statistics.get(key, (None, None))
    if held is None:
        rstd = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps)
        _statistics.clear()
        _statistics[key] = x, rstd  # holding x, so that nobody else gets its address
    return (x.double() * rstd * weight.double()).to(x.dtype)
