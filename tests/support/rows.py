"""The rows on which kernels and reference are compared: DESIGN.md's widths and row counts, and every kind of value."""

import torch

WIDTHS = (1, 2, 7, 8, 15, 16, 17, 31, 33, 64, 127, 1000, 4093, 4096, 16385)
ROWS = (0, 1, 3, 257)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_BITS = {torch.float32: (torch.int32, 8, 23), torch.bfloat16: (torch.int16, 8, 7), torch.float16: (torch.int16, 5, 10)}
# The scales that the contract names; float16 has no 1e30.
_SCALES = {torch.float32: (1e-30, 1e30), torch.bfloat16: (1e-30, 1e30), torch.float16: (1e-5, 1e4)}


def generator(seed):
    return torch.Generator().manual_seed(seed)


def random_rows(rows, width, dtype, seed, scale=1.0):
    return (torch.randn(rows, width, generator=generator(seed)) * scale).to(dtype)


def from_bits(bits, dtype):
    """Integers, wrapped to the dtype's size, as floating-point numbers."""
    integers, exponent_bits, fraction_bits = _BITS[dtype]
    size = 1 + exponent_bits + fraction_bits
    return torch.where(bits >= 2 ** (size - 1), bits - 2**size, bits).to(integers).view(dtype)


def random_bits(width, dtype, seed, exponents):
    """Random sign and fraction; exponent fields from the range given, both ends included."""
    _, exponent_bits, fraction_bits = _BITS[dtype]
    g = generator(seed)
    exponent = torch.randint(exponents[0], exponents[1] + 1, (width,), generator=g)
    fraction = torch.randint(2**fraction_bits, (width,), generator=g)
    sign = torch.randint(2, (width,), generator=g)
    return from_bits((sign << (exponent_bits + fraction_bits)) | (exponent << fraction_bits) | fraction, dtype)


def finite_rows(width, dtype, seed=0):
    """One row of each finite kind, as a (kinds, width) tensor."""
    _, exponent_bits, fraction_bits = _BITS[dtype]
    tiny, huge = _SCALES[dtype]
    g = generator(seed)
    base = torch.randn(width, generator=g)
    sign = torch.where(torch.rand(width, generator=g) < 0.5, -1.0, 1.0)
    column = int(torch.randint(width, (1,), generator=g))
    one_small = torch.zeros(width)
    one_small[column] = torch.finfo(dtype).smallest_normal
    outlier = torch.full((width,), 2.0**-12) * base
    outlier[column] = 1000.0
    full_exponent = 2**exponent_bits - 1
    # 240 binades, where the dtype has as many: the floors of fixed_sum meet terms of every size, and of both signs.
    spread = (1, min(full_exponent - 1, 240))
    rows = [
        base,
        base * tiny,
        base * huge,
        torch.zeros(width),
        -torch.zeros(width),
        sign * 0.0,
        random_bits(width, dtype, seed + 1, (0, 0)),  # subnormals
        one_small,
        sign * torch.finfo(dtype).max,
        random_bits(width, dtype, seed + 2, spread),
        random_bits(width, dtype, seed + 3, (0, full_exponent // 2)),
        outlier,
        sign,
        2.0 ** torch.randint(-8, 8, (width,), generator=g),
        from_bits(torch.full((width,), ((full_exponent // 2) << fraction_bits) - 1), dtype),  # just below 1
        base.abs(),
    ]
    return torch.stack([row.to(dtype) for row in rows])


def infinite_rows(width, dtype, seed=0):
    """Rows with infinities and NaN, among them NaN with all fraction bits set, negative ones and signalling ones.

    Rounding by adding to the bits carries such a NaN into the sign: it becomes -0 where that is not seen to.
    """
    _, exponent_bits, fraction_bits = _BITS[dtype]
    infinity = (2**exponent_bits - 1) << fraction_bits
    sign = 1 << (exponent_bits + fraction_bits)
    full_nan = infinity | (2**fraction_bits - 1)
    found = [infinity, infinity | sign, full_nan, full_nan | sign, infinity | 1, infinity | (1 << (fraction_bits - 1))]
    rows = torch.randn(2 * len(found) + 2, width, generator=generator(seed)).to(dtype)
    for index, bits in enumerate(found):
        # Somewhere in the row, and in its last column, which is in the tail of most widths.
        rows[2 * index, (7 * index + seed) % width] = from_bits(torch.tensor(bits), dtype)
        rows[2 * index + 1, -1] = from_bits(torch.tensor(bits), dtype)
    rows[-2] = torch.inf
    rows[-1, 0] = torch.nan
    rows[-1, -1] = torch.inf
    return rows


def all_rows(width, dtype, seed=0):
    """Every kind."""
    return torch.cat([finite_rows(width, dtype, seed), infinite_rows(width, dtype, seed)])


def special_weight(width, dtype, seed=0):
    """A weight in which zeros, infinities, NaN and extremes stand among ordinary values, where there is room."""
    _, exponent_bits, fraction_bits = _BITS[dtype]
    infinity = (2**exponent_bits - 1) << fraction_bits
    full_nan = infinity | (2**fraction_bits - 1)
    found = [0, 1 << (exponent_bits + fraction_bits), 1, infinity, full_nan, infinity | 1, infinity - 1]
    weight = torch.randn(width, generator=generator(seed + 5)).to(dtype)
    for index, bits in enumerate(found[: width // 2]):
        weight[-1 - 2 * index] = from_bits(torch.tensor(bits), dtype)
    return weight


def rows_of_known_rms(width):
    """Rows whose rstd is the same number in any correct computation; the eps for that; and rstd, in float32.

    The rows are small integers that even bfloat16 holds, permutations of one row with other signs. float32 sums their
    squares exactly in any order, and with eps their mean is 9 * 4^5, so that rstd is 1/96, rounded once.
    """
    g = generator(1)
    base = torch.randint(-120, 121, (width,), generator=g).float()
    x = torch.stack([base[torch.randperm(width, generator=g)] for _ in range(50)])
    x *= torch.where(torch.rand(x.shape, generator=g) < 0.5, -1.0, 1.0)
    mean_square = base.square().mean().item()
    assert width & (width - 1) == 0  # then the mean is a multiple of 1/width, and eps is exact in float32
    assert mean_square < 9 * 4**5
    return x, 9.0 * 4**5 - mean_square, torch.tensor(1 / 96)
