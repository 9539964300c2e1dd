"""The reference in blocks, for a CPU without compiled kernels: the bits of the reference."""

import pytest
import torch

from rmsnorm.numerics import blocks, reference
from rmsnorm.numerics.fixed_sum import inverse_rms
from rmsnorm.spec import NormSpec
from tests.support import rows
from tests.support.bits import same

FORMS = {
    "plain": NormSpec(1e-6),
    "offset, before_scale": NormSpec(1e-6, 1.0, 1),
    "groups": NormSpec(1e-6, group_size=32),
    "gate last": NormSpec(1e-6, activation=0),
    "gate first, groups": NormSpec(1e-6, group_size=32, activation=1, gate_first=True),
}


@pytest.mark.parametrize("eps", [1e-6, 0.0, 1.0, 1e30, 1e-300])
@pytest.mark.parametrize("dtype", rows.DTYPES, ids=str)
def test_an_interval_never_settles_on_another_rstd(dtype, eps):
    for width in (1, 2, 7, 64, 1000, 4096, 16385):
        for x in (
            rows.finite_rows(width, dtype),
            rows.infinite_rows(width, dtype),
            rows.random_rows(20, width, dtype, 1),
        ):
            same(blocks.EstimatedRows().inverse_rms(x, eps), inverse_rms(x, eps))


def test_an_interval_holds_what_the_floors_take():
    """Rows of which the floors take nearly all but the outlier: ordinary sums give other float32 (docs/numerics.md)."""
    width = 16385
    outlier = 1000.0 + torch.arange(64).unsqueeze(-1)
    quantum = 2.0 ** (2 * 10 + (width - 1).bit_length() - 51)
    x = torch.full((64, width), 0.99 * quantum**0.5)
    x[:, :1] = outlier
    exact = inverse_rms(x, 1e-6)
    ordinary = (x.double().square().sum(-1, keepdim=True) / width + 1e-6).rsqrt().float()
    assert (ordinary != exact).sum() > 16
    same(blocks.EstimatedRows().inverse_rms(x, 1e-6), exact)


def test_rows_that_no_interval_settles_are_summed_in_fixed_point(monkeypatch):
    """A row whose outlier makes the quantum large has a wide interval; of ordinary rows few are left."""
    summed = []
    monkeypatch.setattr(blocks, "inverse_rms", lambda x, eps: summed.append(len(x)) or inverse_rms(x, eps))
    ordinary = rows.random_rows(500, 4096, torch.float32, 3)
    blocks.EstimatedRows().inverse_rms(ordinary, 1e-6)
    assert sum(summed) < 25
    summed.clear()
    outliers = torch.full((64, 4096), 2.0**-12) * rows.random_rows(64, 4096, torch.float32, 4)
    outliers[:, 7] = 1000.0 + torch.arange(64)
    blocks.EstimatedRows().inverse_rms(outliers, 1e-6)
    assert sum(summed) > 0


@pytest.mark.parametrize("dtype", rows.DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_blocks_have_the_bits_of_the_whole(form, dtype, monkeypatch):
    monkeypatch.setattr(blocks, "_BLOCK", 5 * 64)  # 33 rows are six whole blocks and a part of one
    spec = FORMS[form]
    for leading in ((33,), (3, 11), (4,), (0,)):
        shape = (*leading, 64)
        x, gate, dy, dh = (
            rows.random_rows(40, 64, dtype, seed)[: torch.Size(leading).numel()].view(shape) for seed in range(4)
        )
        gate = gate if "gate" in form else None
        dh = dh if form in ("plain", "groups") else None
        weight = rows.random_rows(1, 64, torch.float32, 5)[0]
        y, rstd = reference.forward(x, gate, weight, spec)
        for actual, expected in zip(blocks.forward(x, gate, weight, spec), (y, rstd), strict=True):
            same(actual, expected)
        expected = reference.backward(dy, x, gate, rstd, weight, dh, spec)
        for a, e in zip(blocks.backward(dy, x, gate, rstd, weight, dh, spec), expected, strict=True):
            assert (a is None) == (e is None)
            if a is not None:
                same(a, e)


@pytest.mark.parametrize(("alpha", "exact"), [(1.0, False), (1.0, True), (0.22, False), (0.22, True)])
def test_residuals_have_the_bits_of_the_whole(alpha, exact, monkeypatch):
    monkeypatch.setattr(blocks, "_BLOCK", 5 * 64)
    spec = NormSpec(1e-6, exact_sum=exact, alpha=alpha)
    x, residual = (rows.random_rows(33, 64, dtype, seed) for seed, dtype in enumerate((torch.bfloat16, torch.float32)))
    weight = rows.random_rows(1, 64, torch.float32, 5)[0]
    expected = reference.add_forward(x, residual, weight, spec)
    for actual, e in zip(blocks.add_forward(x, residual, weight, spec), expected, strict=True):
        same(actual, e)
