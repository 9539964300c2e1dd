"""Sums that cannot depend on their order (docs/numerics.md, section 2), in the three forms that GPUs are good at.

All three make the same integers, floor(a * b / q), and add them exactly; which is cheapest depends on the hardware
(configurations.py):

    FLOOR   float64 multiplication and floor: portable, and what AMD and the interpreter run;
    DOUBLE  one float64 FMA toward zero per element, onto 1.5 * 2^52 quanta, whose last bit is worth one quantum;
    SINGLE  two float32 FMAs toward zero per element: the upper bits of the product, then the lower ones. No float64.

Rows are the first dimension of every tile. Columns past the end hold 0, which adds nothing in any form.
Triton's interpreter has neither rounding modes nor bfloat16 as hardware has it; `INTERP` replaces those instructions,
and nothing else, by what they mean.
"""

import triton
import triton.language as tl

FLOOR, DOUBLE, SINGLE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def largest_bits(values):
    """The largest magnitude of each row as the bits of a float32: NaN is larger than infinity."""
    return tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)


@triton.jit
def is_finite(bits):
    return bits < 0x7F800000


@triton.jit
def exponent(bits):
    """The e with m < 2^e <= 2m, for the bits of a float32 m; 0 for zero. Infinity's is that of the next binade."""
    # A subnormal is an integer times 2^-149, and integers this small convert exactly.
    whole = bits.to(tl.float32).to(tl.int32, bitcast=True)
    subnormal = tl.where(bits == 0, 0, (whole >> 23) - 126 - 149)
    return tl.where(bits < 0x00800000, subnormal, (bits >> 23) - 126)


@triton.jit
def power_of_two(e):
    """2^e as float64."""
    return ((e + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _power_of_two_single(e):
    return ((e + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _add_toward_zero(a, b, c, quantum, INTERP: tl.constexpr):
    """a * b + c rounded once, toward zero, for a positive c whose last bit is worth `quantum`."""
    if INTERP:
        product = a.to(tl.float64) * b.to(tl.float64)
        floor = tl.floor(product / quantum.to(tl.float64)) * quantum.to(tl.float64)
        result = (c.to(tl.float64) + floor).to(c.dtype)
    elif c.dtype == tl.float64:
        result = tl.inline_asm_elementwise(
            "fma.rz.f64 $0, $1, $2, $3;", "=d,d,d,d", [a, b, c], dtype=tl.float64, is_pure=True, pack=1
        )
    else:
        result = tl.inline_asm_elementwise(
            "fma.rz.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], dtype=tl.float32, is_pure=True, pack=1
        )
    return result


@triton.jit
def single_fits(e, LOG_COLS: tl.constexpr):
    """Whether SINGLE's constants are normal float32 numbers, for products below 2^e: of ordinary rows they are."""
    return (e >= -98 - LOG_COLS) & (e <= 131 - LOG_COLS)


@triton.jit
def start(e, LOG_COLS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FORM: tl.constexpr):
    """An accumulator with nothing in it, for products below 2^e. From +0 no sum of -0 is -0, which k would show."""
    if FORM == FLOOR:
        acc = tl.zeros([ROWS, BLOCK], tl.float64)
    elif FORM == DOUBLE:
        acc = tl.broadcast_to((1.5 * power_of_two(e + LOG_COLS + 1))[:, None], [ROWS, BLOCK])
    else:
        acc = tl.zeros([ROWS, BLOCK], tl.int64)
    return acc


@triton.jit
def accumulate(acc, a, b, e, LOG_COLS: tl.constexpr, FORM: tl.constexpr, INTERP: tl.constexpr):
    """acc with floor(a * b / q) added to each element, q = 2^(e + LOG_COLS - 51)."""
    if FORM == FLOOR:
        quanta_per_unit = power_of_two(51 - LOG_COLS - e)[:, None]
        acc += tl.floor(a.to(tl.float64) * b.to(tl.float64) * quanta_per_unit)
    elif FORM == DOUBLE:
        quantum = power_of_two(e + LOG_COLS - 51)[:, None]
        acc = _add_toward_zero(a.to(tl.float64), b.to(tl.float64), acc, quantum, INTERP)
    else:
        # `coarse` has a last bit of 2^23 quanta and `fine` of one. What `coarse` took is subtracted, exactly, from
        # what `fine` starts from; the product goes into both whole.
        fine = _power_of_two_single(e + LOG_COLS - 28)[:, None]
        coarse = 1.5 * 8388608.0 * fine
        upper = _add_toward_zero(a, b, tl.broadcast_to(coarse, a.shape), fine, INTERP)
        lower = _add_toward_zero(a, b, (coarse + fine) - upper, fine.to(tl.float64) * 2.0**-23, INTERP)
        count = upper.to(tl.int32, bitcast=True) - coarse.to(tl.int32, bitcast=True)
        rest = lower.to(tl.int32, bitcast=True) - fine.to(tl.int32, bitcast=True)
        acc += count.to(tl.int64) * 8388608 + rest
    return acc


@triton.jit
def total(acc, e, LOG_COLS: tl.constexpr, BLOCK: tl.constexpr, FORM: tl.constexpr):
    """q times the sum of each row of an accumulator, as float64: exact."""
    if FORM == FLOOR:
        count = tl.sum(acc, axis=1)
    elif FORM == DOUBLE:
        # All numbers are in the binade of the start value, where bits count quanta. The sum of the bits wraps around.
        begin = (1.5 * power_of_two(e + LOG_COLS + 1)).to(tl.int64, bitcast=True)
        count = (tl.sum(acc.to(tl.int64, bitcast=True), axis=1) - begin * BLOCK).to(tl.float64)
    else:
        count = tl.sum(acc, axis=1).to(tl.float64)
    return count * power_of_two(e + LOG_COLS - 51)


@triton.jit
def _sum_of_tile(a, b, e, LOG_COLS: tl.constexpr, FORM: tl.constexpr, INTERP: tl.constexpr):
    acc = start(e, LOG_COLS, a.shape[0], a.shape[1], FORM)
    acc = accumulate(acc, a, b, e, LOG_COLS, FORM, INTERP)
    return total(acc, e, LOG_COLS, a.shape[1], FORM)


@triton.jit
def fixed_sum(a, b, e, LOG_COLS: tl.constexpr, FORM: tl.constexpr, INTERP: tl.constexpr):
    """The sum of a * b over each row of one tile, |a * b| < 2^e."""
    if FORM == SINGLE:
        # One row out of range sends its whole tile the portable way; no row of a network's activations is.
        if tl.min(single_fits(e, LOG_COLS).to(tl.int32), axis=0) == 1:
            result = _sum_of_tile(a, b, e, LOG_COLS, SINGLE, INTERP)
        else:
            result = _sum_of_tile(a, b, e, LOG_COLS, FLOOR, INTERP)
    else:
        result = _sum_of_tile(a, b, e, LOG_COLS, FORM, INTERP)
    return result
