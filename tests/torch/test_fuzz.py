"""Whatever is thrown at the public functions: the reference's bits come back, or a documented error, nothing else."""

import math
import os
import re

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rmsnorm import RMSNorm, add_rms_norm, rms_norm
from rmsnorm.numerics import fixed_sum
from rmsnorm.spec import ROUNDINGS
from tests.support.bits import same
from tests.support.expected import DTYPES, gradients, normalized

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def fuzzed(examples):
    """The same examples on every run in CI; new ones at every desk."""
    return settings(max_examples=examples, deadline=None, database=None, derandomize="CI" in os.environ)


def values(count, dtype, seed, kind):
    """`count` numbers: ordinary ones, any bit patterns at all, any finite ones, or a few of the special."""
    g = torch.Generator().manual_seed(seed)
    ordinary = (torch.randn(count, generator=g, dtype=torch.float64) * 2.0 ** (seed % 40 - 20)).to(dtype)
    if kind == "ordinary":
        return ordinary
    if kind == "special":
        special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0], dtype=dtype)
        special = torch.cat([special, torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).tiny]).to(dtype) / 2])
        which = torch.randint(len(special), (count,), generator=g)
        return torch.where(torch.rand(count, generator=g) < 0.1, special[which], ordinary)
    bits = torch.randint(-(2**62), 2**62, (count,), generator=g) * 2 + seed % 2
    found = bits.view(INTEGERS[dtype.itemsize])[:count].view(dtype)
    return found if kind == "bits" else torch.where(found.isfinite(), found, ordinary)


KINDS = st.sampled_from(["ordinary", "bits", "finite", "special"])
SEEDS = st.integers(0, 2**31)
WIDTHS = st.one_of(st.integers(1, 40), st.sampled_from([64, 100, 127, 128, 129, 1000]))
LEADING = st.lists(st.integers(0, 5), max_size=4)


@st.composite
def tensors(draw, shape, dtype, kinds=KINDS):
    """Of this shape, and of any strides that PyTorch's views make."""
    layout = draw(st.sampled_from(["dense", "sliced", "permuted", "expanded", "windows", "one memory"]))
    seed, kind = draw(SEEDS), draw(kinds)

    def base(*sizes):
        return values(math.prod(sizes), dtype, seed, kind).reshape(sizes)

    if layout == "sliced":
        steps = [draw(st.integers(1, 3)) for _ in shape]
        starts = [draw(st.integers(0, 2)) for _ in shape]
        whole = base(*(start + size * step for size, step, start in zip(shape, steps, starts, strict=True)))
        slices = tuple(slice(b, b + n * s, s) for n, s, b in zip(shape, steps, starts, strict=True))
        return whole[slices]
    if layout == "permuted":
        order = draw(st.permutations(range(len(shape))))
        return base(*(shape[d] for d in order)).permute([order.index(d) for d in range(len(shape))])
    if layout == "expanded":
        return base(*(draw(st.sampled_from([1, size])) if size else 0 for size in shape)).expand(shape)
    if layout in ("windows", "one memory"):
        limit = 9 if layout == "windows" else 0
        strides = [draw(st.integers(0, limit)) for _ in shape]
        reach = sum(max(0, size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        offset = draw(st.integers(0, 7))
        return base(offset + reach + 1).as_strided(shape, strides, offset)
    return base(*shape)


@st.composite
def problems(draw):
    """x, a weight or None, and options."""
    shape = (*draw(LEADING), draw(WIDTHS))
    dtype = draw(st.sampled_from(DTYPES))
    x = draw(tensors(shape, dtype))
    # Several dimensions only where none of them is empty.
    most = next((i for i, size in enumerate(reversed(shape)) if size == 0), len(shape))
    dims = draw(st.integers(1, min(3, most)))
    weight = draw(st.none() | st.sampled_from(DTYPES).flatmap(lambda w: tensors(shape[-dims:], w)))
    options = {
        "weight_offset": draw(st.sampled_from([0.0, 1.0, -1.0, 0.1, 1])),
        "rounding": draw(st.sampled_from(ROUNDINGS)),
    }
    eps = draw(st.sampled_from([1e-6, 1e-5, 0.0, 1, "1e-3"]) | st.floats(0, 1e30))
    return x, weight, dims, eps, options


@fuzzed(250)
@given(problems())
def test_forward_gives_the_references_bits(problem):
    x, weight, dims, eps, options = problem
    shape = x.shape[-dims:]
    same(
        rms_norm(x, weight, eps, normalized_shape=shape, **options),
        normalized(x, weight, float(eps), dims=dims, **options),
    )
    if weight is not None or dims == 1:
        same(rms_norm(x, weight, eps, **options), normalized(x, weight, float(eps), dims=dims, **options))


@fuzzed(150)
@given(problems(), st.data())
def test_add_gives_the_references_bits(problem, data):
    x, weight, dims, eps, options = problem
    residual = data.draw(tensors(tuple(x.shape), x.dtype))
    norm = RMSNorm(x.shape[-dims:], max(float(eps), 1e-30), elementwise_affine=weight is not None, **options)
    if weight is not None:
        norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    y, h = norm(x, residual)
    same(h, x + residual)
    same(y, normalized(h, weight, norm.eps, dims=dims, **options))


@fuzzed(150)
@given(problems(), st.data())
def test_backward_gives_the_references_bits(problem, data):
    x, weight, dims, eps, options = problem
    residual = data.draw(st.none() | tensors(tuple(x.shape), x.dtype))
    if residual is not None and dims > 1 and weight is None:
        dims = 1  # add_rms_norm has no normalized_shape
    # Leaves of the given strides: detach keeps them, clone would not.
    inputs = [None if t is None else t.detach().requires_grad_() for t in (x, residual, weight)]
    if residual is None:
        outputs = [rms_norm(inputs[0], inputs[2], eps, normalized_shape=x.shape[-dims:], **options)]
        h, dh = x, None
    else:
        outputs = [*add_rms_norm(*inputs, eps, **options)]
        h = x + residual
        dh = data.draw(tensors(tuple(x.shape), x.dtype))
    y = outputs[0]
    same(y.detach(), normalized(h, weight, float(eps), dims=dims, **options))
    dy = data.draw(tensors(tuple(x.shape), y.dtype))
    wanted = [t for t in inputs if t is not None]
    found = [*torch.autograd.grad(outputs, wanted, [dy] if dh is None else [dy, dh])]

    # What has more bits than the computation goes in and out of it in float32.
    narrow = x.dtype != torch.float64
    weight_in = weight.float() if weight is not None and narrow and weight.dtype == torch.float64 else weight
    dy_in = dy.float() if narrow and dy.dtype == torch.float64 else dy
    offset = options["weight_offset"]
    dx, dweight = gradients(dy_in, h, weight_in, float(eps), weight_offset=offset, dh=dh, dims=dims)
    same(found[0], dx)
    if residual is not None:
        same(found[1], dx)
    if weight is not None:
        same(found[-1], dweight.to(weight.dtype))


@fuzzed(300)
@given(st.data())
def test_out_anywhere_in_one_buffer_is_right_or_refused_untouched(data):
    shape = (data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 20)))
    buffer = values(4096, data.draw(st.sampled_from(DTYPES)), data.draw(SEEDS), "ordinary")
    kept = buffer.clone()

    def view(near=None):
        if near is not None and data.draw(st.booleans()):
            return buffer.as_strided(shape, near.stride(), data.draw(st.integers(0, 500)))
        column = data.draw(st.sampled_from([1, 1, 1, 2, 3]))
        row = data.draw(st.sampled_from([shape[2] * column, 40, 60, 1, 0]))
        outer = data.draw(st.sampled_from([shape[1] * row, row * 5, 250, 20]))
        return buffer.as_strided(shape, (outer, row, column), data.draw(st.integers(0, 500)))

    x = view()
    out = x if data.draw(st.integers(0, 5)) == 0 else view(x)
    weight = buffer[: shape[2]] if data.draw(st.integers(0, 5)) == 0 else None
    expected = normalized(x.clone(), None if weight is None else weight.clone())
    elements = torch.zeros(4096, dtype=torch.bool)
    elements.as_strided(shape, out.stride(), out.storage_offset()).fill_(True)
    _, refusal = attempt(rms_norm, x, weight, out=out)
    if refusal is not None:
        assert re.match("ValueError: out must .*(overlap|share no memory)", refusal)
        same(buffer, kept)
    else:
        assert int(elements.sum()) == out.numel()
        same(out.clone(), expected)
        same(buffer[~elements], kept[~elements])


SCRAP = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(0, 9), max_size=3),
    st.sampled_from(["once", "before_scale", "1e-6", torch.float32, (3, 4), torch.Size([4])]),
    st.builds(
        lambda shape, dtype, device: torch.ones(shape, dtype=dtype, device=device),
        st.lists(st.integers(0, 4), max_size=3),
        st.sampled_from([*DTYPES, torch.int64, torch.bool, torch.complex64]),
        st.sampled_from(["cpu", "cpu", "cpu", "meta"]),
    ),
)


def attempt(function, *arguments, **options):
    """What it returns and None, or None and what it says against it."""
    try:
        return function(*arguments, **options), None
    except (TypeError, ValueError) as error:
        return None, f"{type(error).__name__}: {error}"


def is_answer(t):
    return isinstance(t, torch.Tensor) and t.dtype in DTYPES and t.dim() > 0 and t.shape[-1] > 0


@fuzzed(300)
@given(
    SCRAP,
    SCRAP,
    st.dictionaries(st.sampled_from(["eps", "weight_offset", "rounding", "normalized_shape", "out"]), SCRAP),
)
def test_scrap_is_refused_or_answered(x, weight, options):
    y, refusal = attempt(rms_norm, x, weight, **options)
    if refusal is None:
        assert is_answer(y)
        assert y.shape == x.shape
        if x.device.type == "cpu" and "out" not in options:
            eps = options.get("eps", 1e-6)
            eps = torch.finfo(fixed_sum.compute_dtype(x)).eps if eps is None else float(eps)
            shape = options.get("normalized_shape")
            dims = weight.dim() if weight is not None else len(shape) if isinstance(shape, (tuple, list)) else 1
            offset, rounding = float(options.get("weight_offset", 0.0)), options.get("rounding", "once")
            same(y, normalized(x, weight, eps, weight_offset=offset, rounding=rounding, dims=dims))


@fuzzed(150)
@given(SCRAP, SCRAP, SCRAP, st.dictionaries(st.sampled_from(["eps", "weight_offset", "rounding"]), SCRAP))
def test_scrap_is_refused_or_added(x, residual, weight, options):
    answer, refusal = attempt(add_rms_norm, x, residual, weight, **options)
    if refusal is None:
        y, h = answer
        assert is_answer(y)
        assert h.shape == y.shape == x.shape == residual.shape


@fuzzed(200)
@given(SCRAP, st.dictionaries(st.sampled_from(["eps", "weight_offset", "rounding", "dtype"]), SCRAP))
def test_scrap_makes_a_module_or_an_error(dim, options):
    norm, refusal = attempt(RMSNorm, dim, **options)
    if refusal is None:
        assert norm(torch.ones(2, *norm.normalized_shape)).shape == (2, *norm.normalized_shape)
