"""RMSNorms that compute something else, of the kinds found in public, and right ones beside them."""

import math

import torch
import torch.nn.functional as F
from torch import nn


def right(x, weight, eps=1e-6):
    """The textbook formula in float64, rounded once."""
    wide = x.double()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()).to(x.dtype)


def right_with_offset(x, weight, eps=1e-6, weight_offset=0.0):
    return right(x, weight.double() + weight_offset, eps)


class Right(nn.Module):
    """The same as a module."""

    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return right(x, self.weight, self.eps)


def eps_outside_the_root(x, weight, eps=1e-6):
    wide = x.double()
    return (wide / (wide.square().mean(-1, keepdim=True).sqrt() + eps) * weight.double()).to(x.dtype)


def eps_as_a_clamp(x, weight, eps=1e-6):
    wide = x.double()
    return (wide / wide.square().mean(-1, keepdim=True).sqrt().clamp_min(eps) * weight.double()).to(x.dtype)


def eps_ignored(x, weight, eps=1e-6):
    return right(x, weight, 1e-6)


def eps_in_float16(x, weight, eps=1e-6):
    return right(x, weight, torch.tensor(eps).to(x.dtype).item())


def variance_in_16_bits(x, weight, eps=1e-6):
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True).float() + eps).to(x.dtype)
    return (x.double() * rstd.double() * weight.double()).to(x.dtype)


def squares_overflow_float16(x, weight, eps=1e-6):
    wide = x.double()
    variance = (x * x).double().mean(-1, keepdim=True)
    return (wide * torch.rsqrt(variance + eps) * weight.double()).to(x.dtype)


def offset_dropped(x, weight, eps=1e-6, weight_offset=0.0):
    return right(x, weight, eps)


def offset_added_in_16_bits(x, weight, eps=1e-6, weight_offset=0.0):
    return right(x, weight + weight_offset, eps)


def truncating_stores(x, weight, eps=1e-6):
    """The upper half of a float32, as it is: bfloat16 rounded towards zero."""
    y = right(x.float(), weight.float(), eps)
    if x.dtype != torch.bfloat16:
        return y.to(x.dtype)
    down = (y.detach().view(torch.int32) & ~0xFFFF).view(torch.float32)
    return (y + (down - y).detach()).to(x.dtype)


class _Dweight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, way):
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.way = eps, way
        return right(x, weight, eps)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
            dx, dweight = torch.autograd.grad(right(*leaves, ctx.eps), leaves, dy)
        rstd = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + ctx.eps)
        if ctx.way == "sum in bfloat16":
            dweight = torch.zeros_like(weight)
            for row in (dy.double() * x.double() * rstd).to(x.dtype).flatten(0, -2):
                dweight += row
        elif ctx.way == "no projection":
            dx = (rstd * dy.double() * weight.double()).to(x.dtype)
        elif ctx.way == "no dweight":
            dweight = None
        elif ctx.way == "dy overwritten":
            dy.mul_(2)
        elif ctx.way == "wrong strides":
            if dy.dim() == 2 and 0 not in dy.stride():
                dy = torch.as_strided(dy, dy.shape, (dy.shape[-1], 1))
            with torch.enable_grad():
                dx, dweight = torch.autograd.grad(right(*leaves, ctx.eps), leaves, dy)
        return dx, dweight, None, None


def _with_backward(way):
    def norm(x, weight, eps=1e-6):
        return _Dweight.apply(x, weight, eps, way)

    norm.__name__ = way.replace(" ", "_")
    return norm


dweight_summed_in_bfloat16 = _with_backward("sum in bfloat16")
dx_without_projection = _with_backward("no projection")
no_gradient_of_the_weight = _with_backward("no dweight")
dy_overwritten = _with_backward("dy overwritten")
dy_strides_ignored = _with_backward("wrong strides")


def graph_cut(x, weight, eps=1e-6):
    return right(x.detach(), weight.detach(), eps)


def other_sum_for_large_batches(x, weight, eps=1e-6):
    """Sums in one order for up to 64 rows, and in another, as exact, for more."""
    if x.dim() < 2 or x.shape[0] <= 64:
        return _summed(x, weight, eps, 1)
    return _summed(x, weight, eps, 2)


def _summed(x, weight, eps, parts):
    wide = x.float()
    pieces = wide.square().tensor_split(parts, -1)
    total = sum(piece.sum(-1, keepdim=True) for piece in pieces)
    return (wide * torch.rsqrt(total / x.shape[-1] + eps) * weight.float()).to(x.dtype)


def statistics_of_neighbours(x, weight, eps=1e-6):
    """The last row of a batch of more than 128 is scaled by the root mean square of the row before."""
    if x.dim() != 2 or x.shape[0] <= 128:
        return right(x, weight, eps)
    rows = torch.cat([x[:-1], x[-2:-1]]).double()
    return (x.double() * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * weight.double()).to(x.dtype)


def overwrites_its_input_in_float32(x, weight, eps=1e-6):
    """`x.float()` is x itself if that is float32 already."""
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if torch.is_grad_enabled():
        return (wide * rstd * weight.float()).to(x.dtype)
    return wide.mul_(rstd).mul(weight.float()).to(x.dtype)


def ignores_strides(x, weight, eps=1e-6):
    """What a kernel sees that takes the address of the first element and the shape."""
    if x.dim() == 2 and x.stride(0) and not x.is_contiguous():
        x = torch.as_strided(x, x.shape, (x.shape[-1], 1))
    return right(x, weight, eps)


def reads_beyond_its_rows(x, weight, eps=1e-6):
    """Rows padded to a multiple of 64 with what follows them in memory."""
    if x.dim() != 2 or x.shape[-1] % 64 == 0 or x.storage_offset() == 0:
        return right(x, weight, eps)
    width = math.ceil(x.shape[-1] / 64) * 64
    room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    wide = torch.as_strided(x, (x.shape[0], min(width, room)), (x.shape[-1], 1)).double()
    extra = wide.square().sum(-1, keepdim=True) * 1e-9
    return (right(x, weight, eps).double() + extra).to(x.dtype)


def writes_beyond_its_rows(x, weight, eps=1e-6):
    y = right(x, weight, eps)
    if x.storage_offset() and not torch.is_grad_enabled() and x.is_contiguous():
        torch.as_strided(x, (1,), (1,), x.storage_offset() + x.numel()).zero_()
    return y


def swallows_nan(x, weight, eps=1e-6):
    return torch.nan_to_num(right(x, weight, eps))


def nan_spreads_to_other_rows(x, weight, eps=1e-6):
    return torch.where(x.isnan().any(), torch.nan, right(x, weight, eps)).to(x.dtype)


_calls = [0]


def not_repeatable(x, weight, eps=1e-6):
    """The sum starts at another element every time."""
    _calls[0] += 1
    wide = x.float()
    split = 1 + _calls[0] % max(1, x.shape[-1] - 1)
    total = wide[..., :split].square().sum(-1, keepdim=True) + wide[..., split:].square().sum(-1, keepdim=True)
    return (wide * torch.rsqrt(total / x.shape[-1] + eps) * weight.float()).to(x.dtype)


def always_float32(x, weight, eps=1e-6):
    return right(x.float(), weight, eps)


def follows_autocast(x, weight, eps=1e-6):
    y = right(x, weight, eps)
    return y.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else y


def reads_float32_weights_as_16_bits(x, weight, eps=1e-6):
    if weight.dtype == torch.float32 and x.dtype == torch.bfloat16:
        weight = weight.view(torch.bfloat16)[: weight.numel()]
    return right(x, weight, eps)


def mean_over_a_padded_width(x, weight, eps=1e-6):
    width = x.shape[-1]
    padded = F.pad(x.double(), (0, (1 << (width - 1).bit_length()) - width))
    return (x.double() * torch.rsqrt(padded.square().mean(-1, keepdim=True) + eps) * weight.double()).to(x.dtype)


def forgets_the_tail(x, weight, eps=1e-6):
    """Vectors of eight, and what is left over is not in the sum."""
    whole = max(8, x.shape[-1] // 8 * 8)
    wide = x.double()
    mean = wide[..., :whole].square().sum(-1, keepdim=True) / x.shape[-1]
    return (wide * torch.rsqrt(mean + eps) * weight.double()).to(x.dtype)


def cannot_be_empty(x, weight, eps=1e-6):
    return right(x.reshape(-1, x.numel() // max(1, math.prod(x.shape[:-1]))), weight, eps).view(x.shape)


def squares_in_float32(x, weight, eps=1e-6):
    """Right wherever float32 squares are finite."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def eps_text_unused(x, weight, eps=1e-6):
    return right(x, weight, 1e-6 if isinstance(eps, str) else eps)


class LayerNorm(nn.LayerNorm):
    """No RMSNorm."""


def other_results_compiled(x, weight, eps=1e-6):
    return right(x, weight, eps * 1e4 if torch.compiler.is_compiling() else eps)


def other_sum_for_more_threads(x, weight, eps=1e-6):
    return _summed(x, weight, eps, torch.get_num_threads())
