"""RMSNorm in exact arithmetic, on Python's integers and fractions, and the errors that the contract allows."""

from fractions import Fraction
from math import isqrt

import torch

# Unit roundoff: half the distance from 1 to the next number. A rounded result is off by this factor at most.
ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SUBNORMAL_STEP = {torch.float32: 2.0**-149, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}
_PRECISION = 200  # bits of the inverse root mean square: an error of 2^-200, which no bound here notices
_UNIT = 149  # float32, bfloat16 and float16 are all multiples of 2^-149


def integers(row):
    """The elements of a row as multiples of 2^-149; exact, as 2^149 times any float32 is a float64."""
    return [int(v) for v in (row.double() * 2.0**_UNIT).tolist()]


def sum_of_squares(row):
    return Fraction(sum(v * v for v in integers(row)), 2 ** (2 * _UNIT))


def inverse_rms(row, eps):
    """1 / sqrt(mean(x^2) + eps), to 200 bits."""
    v = sum_of_squares(row) / len(row) + Fraction(eps)
    # isqrt of 1/v * 4^shift, with a shift that leaves at least _PRECISION bits.
    shift = _PRECISION + max(0, (v.numerator.bit_length() - v.denominator.bit_length()) // 2 + 1)
    return Fraction(isqrt((v.denominator << (2 * shift)) // v.numerator), 2**shift)


def relative_errors(y, row, gain, eps):
    """|y - exact| / |exact| of each normal element of y, as float64; gain is a list of fractions or None."""
    r = inverse_rms(row, eps)
    gain = [Fraction(1)] * len(row) if gain is None else gain
    smallest = torch.finfo(y.dtype).smallest_normal
    errors = []
    for y_i, x_i, g_i in zip(y.double().tolist(), integers(row), gain, strict=True):
        if abs(y_i) >= smallest:
            exact = Fraction(x_i * g_i.numerator * r.numerator, g_i.denominator * r.denominator << _UNIT)
            errors.append(float(abs(Fraction(y_i) / exact - 1)))
    return errors


def quantum(exponent, terms):
    """The q of `fixed_sum` for terms of magnitude at most 2^exponent."""
    return 2.0 ** (exponent + (terms - 1).bit_length() - 51)


def exponent(magnitude):
    """The e with magnitude < 2^e <= 2 * magnitude, for magnitude > 0."""
    numerator, denominator = float(magnitude).as_integer_ratio()
    return numerator.bit_length() - denominator.bit_length() + 1


def floor_error(row):
    """By how much, relatively, the floors of `fixed_sum` can raise this row's rstd.

    S is too small by n * q at most. With d = n * q / S, rstd is too large by a factor 1 / sqrt(1 - d), which for
    d <= 1/4 is below 1 + d/2 + d^2/2 (the series' coefficients from the third on are at most 3/8, and 3/8 / (1 - d) is
    1/2). An eps only makes it smaller.
    """
    largest = row.double().abs().max().item()
    d = len(row) * quantum(2 * exponent(largest), len(row)) / float(sum_of_squares(row))
    assert d <= 0.25
    return d / 2 + d * d / 2


def error_bound(row, y_dtype, offset=False):
    """The contract's bound on the relative error of y: three roundings in float32 and a hair.

    The roundings are those of rstd, x_hat and the product with the gain. The hair: the float64 operations before rstd
    (1/d, the product with it, the addition of eps: half of their errors, as a root is taken; the root, the division:
    3.5 roundings of 2^-53, below 2^-51), and the floors of the sum. An offset adds the rounding of the gain, a 16-bit
    result its own.
    """
    u = ROUNDOFF[torch.float32]
    bound = (1 + u) ** (4 if offset else 3) * (1 + 2.0**-51) * (1 + floor_error(row))
    if y_dtype != torch.float32:
        bound *= 1 + ROUNDOFF[y_dtype]
    return bound - 1
