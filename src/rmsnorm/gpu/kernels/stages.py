"""The stages around the norm: a residual before it, a gate before or after it. docs/numerics.md has every operation."""

import triton
import triton.language as tl

from rmsnorm.gpu.kernels.values import load, round_to
from rmsnorm.numerics import stages

_LARGEST = tl.constexpr(stages.LARGEST_EXPONENT)
_LOG2_E = tl.constexpr(stages.LOG2_E)
_P_2, _P_0 = tl.constexpr(stages.P_2), tl.constexpr(stages.P_0)
_Q_3, _Q_1 = tl.constexpr(stages.Q_3), tl.constexpr(stages.Q_1)
# A float64 that is added to it becomes an integer, the nearest or the even one of two, in the last bits of the sum.
_INTEGERS = tl.constexpr(1.5 * 2.0**52)


# ---------------------------------------------------------------- a residual


@triton.jit
def add_residual(x, residual, alpha, X: tl.constexpr, INTERP: tl.constexpr):
    """float32(t) + residual, where t is x, or x * alpha rounded to X, the dtype x has in memory."""
    if alpha is not None:
        x = round_to(x * alpha, X, INTERP)
    return x + residual


@triton.jit
def normed_sum(total, H: tl.constexpr, EXACT: tl.constexpr, INTERP: tl.constexpr):
    """What is normalised of a sum: itself, or its rounding to H, the dtype of h."""
    if not EXACT:
        total = round_to(total, H, INTERP)
    return total


# ---------------------------------------------------------------- a gate


@triton.jit
def sigmoid(z):
    """stages.sigmoid: float64 inside, no library's exponential."""
    bounded = tl.where(z > _LARGEST, _LARGEST, tl.where(z < -_LARGEST, -_LARGEST, z))  # NaN stays
    exponent = bounded.to(tl.float64) * _LOG2_E
    integer = exponent + _INTEGERS
    f = exponent - (integer - _INTEGERS)
    square = f * f
    p = (square + _P_2) * square + _P_0
    q = (square * _Q_3 + _Q_1) * f
    # What is above the last twelve bits is shifted out.
    power = ((integer.to(tl.int64, bitcast=True) + 1023) << 52).to(tl.float64, bitcast=True)
    e = (p + q) * power
    return (e / ((p - q) + e)).to(tl.float32)


@triton.jit
def activated(z, s, SILU: tl.constexpr):
    act = s
    if SILU:
        act = z * s
    return act


@triton.jit
def activation_slope(z, s, SILU: tl.constexpr):
    rest = 1.0 - s
    if SILU:
        rest = 1.0 + z * rest
    return s * rest


# ---------------------------------------------------------------- both, of one row


@triton.jit
def load_activation(gate, column, mask, SILU: tl.constexpr, INTERP: tl.constexpr):
    z = load(gate + column, mask, INTERP)
    return activated(z, sigmoid(z), SILU)


@triton.jit
def load_input(
    x,
    residual,
    gate,
    alpha,
    column,
    mask,
    SILU: tl.constexpr,
    FIRST: tl.constexpr,
    EXACT: tl.constexpr,
    INTERP: tl.constexpr,
):
    """Some columns of what is normalised: x, its sum with a residual, or its product with a gate that comes first."""
    values = load(x + column, mask, INTERP)
    if residual is not None:
        total = add_residual(values, load(residual + column, mask, INTERP), alpha, x.dtype.element_ty, INTERP)
        values = normed_sum(total, residual.dtype.element_ty, EXACT, INTERP)
    if gate is not None and FIRST:
        values = values * load_activation(gate, column, mask, SILU, INTERP)
    return values
