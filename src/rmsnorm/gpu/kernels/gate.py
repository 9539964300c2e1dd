"""The gate: act(z), and its slope, from s = sigmoid(z). docs/numerics.md has every operation."""

import triton
import triton.language as tl

from rmsnorm.numerics import stages

_LARGEST = tl.constexpr(stages.LARGEST_EXPONENT)
_LOG2_E = tl.constexpr(stages.LOG2_E)
_P_2, _P_0 = tl.constexpr(stages.P_2), tl.constexpr(stages.P_0)
_Q_3, _Q_1 = tl.constexpr(stages.Q_3), tl.constexpr(stages.Q_1)
# A float64 that is added to it becomes an integer, the nearest or the even one of two, in the last bits of the sum.
_INTEGERS = tl.constexpr(1.5 * 2.0**52)


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
