"""Every way in which rows can lie in memory."""

import torch

from tests.support.rows import generator


def base(seed, dtype, *shape):
    """Random and contiguous."""
    return torch.randn(*shape, generator=generator(seed)).to(dtype)


def _offset(seed, dtype, elements):
    """Rows that begin at an odd address: `elements` past an aligned one."""
    return base(seed, dtype, elements + 6 * 33)[elements:].view(6, 33)


def _unmergeable(seed, dtype):
    """Nine leading dimensions, no two of which make one: each is cut out of a larger one."""
    return base(seed, dtype, *[3] * 9, 5)[(slice(0, 2),) * 9]


STRIDES = {
    "slice of a fused projection": lambda s, t: base(s, t, 5, 96)[:, 32:64].unflatten(1, (2, 16)),
    "heads of a fused projection": lambda s, t: base(s, t, 2, 9, 3, 4, 40)[:, :, s % 3],
    "heads before positions": lambda s, t: base(s, t, 2, 9, 4, 40).transpose(1, 2),
    "transposed batch": lambda s, t: base(s, t, 7, 5, 33).transpose(0, 1),
    "reversed dimensions": lambda s, t: base(s, t, 3, 4, 5, 17).permute(2, 1, 0, 3),
    "expanded rows": lambda s, t: base(s, t, 1, 40).expand(9, 40),
    "expanded outer dimension": lambda s, t: base(s, t, 6, 40).expand(3, 6, 40),
    "expanded columns": lambda s, t: base(s, t, 6, 1).expand(6, 40),
    "every second column": lambda s, t: base(s, t, 6, 80)[:, ::2],
    "transposed matrix": lambda s, t: base(s, t, 33, 6).t(),
    "every second row": lambda s, t: base(s, t, 12, 33)[::2],
    "overlapping windows": lambda s, t: base(s, t, 200).unfold(0, 33, 5),
    "one column": lambda s, t: base(s, t, 6, 9)[:, 3:4],
    "one column, odd stride": lambda s, t: base(s, t, 6, 9).as_strided((6, 1), (9, 7), 2),
    "offset by one": lambda s, t: _offset(s, t, 1),
    "offset by three": lambda s, t: _offset(s, t, 3),
    "nine dimensions that do not merge": _unmergeable,
    "seven dimensions that do not merge": lambda s, t: _unmergeable(s, t)[0, 1],
    "dimensions of size one": lambda s, t: base(s, t, 1, 6, 1, 33).transpose(0, 2),
    "one row": lambda s, t: base(s, t, 1000),
    "no rows, strided": lambda s, t: base(s, t, 4, 0, 33).transpose(0, 1),
}
