"""Norms with a residual, a gate or groups, right ones and faulty ones."""

import torch
import torch.nn.functional as F

from tests.conformance.faulty.formula import right


def _sum(x, residual):
    return (x.double() + residual.double()).to(residual.dtype)


def _norm(h, weight, eps, dtype):
    return right(h.double(), weight, eps).to(dtype)


def add(x, residual, weight, eps=1e-6):
    h = _sum(x, residual)
    return _norm(h, weight, eps, x.dtype), h


def add_exact(x, residual, weight, eps=1e-6):
    return _norm(x.double() + residual.double(), weight, eps, x.dtype), _sum(x, residual)


def add_in_place(x, residual, weight, eps=1e-6):
    residual.copy_(_sum(x, residual))
    x.copy_(_norm(residual, weight, eps, x.dtype))


def add_without_the_sum(x, weight, eps=1e-6, residual=None):
    return right(x, weight, eps) if residual is None else add(x, residual, weight, eps)[0]


def residual_ignored(x, weight, eps=1e-6, residual=None):
    return right(x, weight, eps)


def residual_added_after_the_norm(x, residual, weight, eps=1e-6):
    return (right(x, weight, eps).double() + residual.double()).to(x.dtype)


def sum_truncated(x, residual, weight, eps=1e-6):
    """bfloat16 sums are cut off."""
    s = x.float() + residual.float()
    if residual.dtype == torch.bfloat16:
        s = s + ((s.detach().view(torch.int32) & ~0xFFFF).view(torch.float32) - s).detach()
    h = s.to(residual.dtype)
    return _norm(x.double() + residual.double(), weight, eps, x.dtype), h


def branch_in_place_of_the_sum(x, residual, weight, eps=1e-6):
    return add(x, residual, weight, eps)[0], x * 1


def stream_in_the_dtype_of_the_branch(x, residual, weight, eps=1e-6):
    y, h = add(x, residual, weight, eps)
    return y, h.to(x.dtype)


def stream_with_the_bits_of_the_branch(x, residual, weight, eps=1e-6):
    y, h = add(x, residual, weight, eps)
    return y, h.to(x.dtype).to(h.dtype)


def residual_strides_ignored(x, residual, weight, eps=1e-6):
    if not residual.requires_grad and residual.untyped_storage().nbytes() >= residual.nbytes:
        residual = torch.as_strided(residual, residual.shape, torch.empty(residual.shape).stride())
    return add(x, residual, weight, eps)


def residual_overwritten(x, residual, weight, eps=1e-6):
    y, h = add(x, residual, weight, eps)
    if not h.requires_grad:
        residual.copy_(h)
    return y, h


def residual_without_gradient(x, residual, weight, eps=1e-6):
    return add(x, residual.detach(), weight, eps)


def sum_without_gradient(x, residual, weight, eps=1e-6):
    y, h = add(x, residual, weight, eps)
    return y, h.detach()


class _SumForgotten(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h.clone()

    @staticmethod
    def backward(ctx, dh):
        return torch.zeros_like(dh)


def gradient_of_the_sum_forgotten(x, residual, weight, eps=1e-6):
    y, h = add(x, residual, weight, eps)
    return y, _SumForgotten.apply(h)


# ---------------------------------------------------------------- gates


def gated(x, weight, eps=1e-6, gate=None):
    return (
        right(x, weight, eps) if gate is None else (right(x.double(), weight, eps) * F.silu(gate.double())).to(x.dtype)
    )


def gated_before(x, gate, weight, eps=1e-6):
    return right(x.double() * F.silu(gate.double()), weight, eps).to(x.dtype)


def gated_by_a_sigmoid(x, gate, weight, eps=1e-6):
    return (right(x.double(), weight, eps) * torch.sigmoid(gate.double())).to(x.dtype)


def gated_after(x, gate, weight, eps=1e-6):
    """The gate is required."""
    return gated(x, weight, eps, gate)


def gate_by_another_function(x, weight, eps=1e-6, gate=None):
    y = right(x, weight, eps)
    return y if gate is None else y * F.softplus(gate)


def activation_in_16_bits(x, weight, eps=1e-6, gate=None):
    y = right(x, weight, eps)
    return y if gate is None else (y.double() * F.silu(gate.bfloat16()).double()).to(x.dtype)


def silu_by_two_exponentials(x, weight, eps=1e-6, gate=None):
    if gate is None:
        return right(x, weight, eps)
    e = gate.float().exp()
    return (right(x.double(), weight, eps) * (gate.float() * e / (1 + e)).double()).to(x.dtype)


def nan_gates_are_shut(x, weight, eps=1e-6, gate=None):
    return gated(x, weight, eps, None if gate is None else gate.nan_to_num(nan=0.0))


def gate_strides_ignored(x, weight, eps=1e-6, gate=None):
    if gate is not None and not gate.is_contiguous():
        gate = torch.as_strided(gate, gate.shape, torch.empty(gate.shape).stride())
    return gated(x, weight, eps, gate)


def gate_without_gradient(x, weight, eps=1e-6, gate=None):
    return gated(x, weight, eps, None if gate is None else gate.detach())


class _HalfSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate):
        ctx.save_for_backward(gate)
        return F.silu(gate)

    @staticmethod
    def backward(ctx, dact):
        return dact * torch.sigmoid(ctx.saved_tensors[0])


def derivative_of_silu_is_sigmoid(x, weight, eps=1e-6, gate=None):
    if gate is None:
        return right(x, weight, eps)
    return (right(x.double(), weight, eps) * _HalfSilu.apply(gate.double())).to(x.dtype)


# ---------------------------------------------------------------- groups


def grouped(x, weight, eps=1e-6, group_size=None):
    if not group_size:
        return right(x, weight, eps)
    if x.shape[-1] % group_size:
        raise ValueError("group_size must divide the width")
    one = torch.ones(group_size, dtype=torch.float64)
    x_hat = right(x.double().unflatten(-1, (-1, group_size)), one, eps).flatten(-2)
    return (x_hat * weight.double()).to(x.dtype)


def grouped_by_their_number(x, weight, eps=1e-6, num_groups=1):
    if x.shape[-1] % num_groups:
        raise ValueError("num_groups must divide the width")
    return grouped(x, weight, eps, x.shape[-1] // num_groups)


def group_size_ignored(x, weight, eps=1e-6, group_size=None):
    if group_size and x.shape[-1] % group_size:
        raise ValueError("group_size must divide the width")
    return right(x, weight, eps)


def what_is_left_over_is_not_normalised(x, weight, eps=1e-6, group_size=None):
    if not group_size:
        return right(x, weight, eps)
    whole = x.shape[-1] // group_size * group_size
    return torch.cat([grouped(x[..., :whole], weight[:whole], eps, group_size), x[..., whole:]], -1)


def nan_in_all_groups(x, weight, eps=1e-6, group_size=None):
    y = grouped(x, weight, eps, group_size)
    return y + torch.where(x.isnan().any(-1, keepdim=True), torch.nan, 0.0).to(y.dtype)


class _OneMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, group_size):
        with torch.enable_grad():
            leaf, gain = x.detach().requires_grad_(), weight.detach().requires_grad_()
            ctx.parts = leaf, gain, grouped(leaf, gain, eps, group_size), right(leaf, gain, eps)
        return ctx.parts[2].detach()

    @staticmethod
    def backward(ctx, dy):
        leaf, gain, y, whole = ctx.parts
        dx = torch.autograd.grad(whole, leaf, dy, retain_graph=True)[0]
        return dx, torch.autograd.grad(y, gain, dy, retain_graph=True)[0], None, None


def gradient_of_the_whole_row(x, weight, eps=1e-6, group_size=None):
    if not group_size or group_size == x.shape[-1]:
        return right(x, weight, eps)
    return _OneMean.apply(x, weight, eps, group_size)


def groups_of_sixteen(x, weight, eps=1e-6):
    """Always: there is nothing to choose."""
    return grouped(x, weight, eps, 16)
