"""modulated_rms_norm: the bits of the norm, a product and a sum, forward and backward, whoever shares a scale."""

import itertools

import pytest
import torch

from rmsnorm import ModulatedRMSNorm, modulated_rms_norm, rms_norm
from rmsnorm.functional.modulated import steps
from rmsnorm.numerics.fixed_sum import sum_rows
from rmsnorm.spec import ROUNDINGS, make_spec
from tests.support.bits import bits_equal

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
BATCH, TOKENS, COLS = 3, 130, 40  # more tokens than a leaf of the tree has rows, and no power of two
X_SHAPE = (BATCH, TOKENS, COLS)
SHARING = {
    "sample": (BATCH, 1, COLS),
    "token": (BATCH, TOKENS, COLS),
    "all": (COLS,),
    "position": (TOKENS, COLS),
    "all, said at length": (1, 1, COLS),
}


def made(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def results(function, tensors, spec_options):
    """y, and the gradients of what there is."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    y = function(*leaves, **spec_options)
    dy = made(*y.shape, dtype=y.dtype, seed=9)
    return [y.detach(), *torch.autograd.grad(y, [t for t in leaves if t is not None], dy)]


def written_out(x, scale, shift, weight, eps, weight_offset, rounding):
    """The steps; a gradient of what rows share is the tree over those rows, of each sample by itself."""
    wide = x.float() if rounding == "once" else x
    n = rms_norm(wide, weight, eps, weight_offset=weight_offset, rounding=rounding)
    y = n.float() * (1 + scale.float())
    if shift is not None:
        y = y + shift.float()
    return y.to(x.dtype if rounding == "once" else n.dtype)


def same(found, expected):
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    assert all(itertools.starmap(bits_equal, zip(found, expected, strict=True)))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_the_fused_operator_has_the_bits_of_the_steps(x_dtype, rounding):
    options = {"eps": 1e-5, "weight_offset": 0.5, "rounding": rounding}
    cases = list(itertools.product(SHARING, (*SHARING, None), FLOATS, (None, *FLOATS)))
    for case, (scale_of, shift_of, dtype, weight_dtype) in enumerate(cases):
        if case % 3 != FLOATS.index(x_dtype):  # each case in one dtype of x
            continue
        shift = None if shift_of is None else made(*SHARING[shift_of], dtype=FLOATS[case % 2], seed=2)
        weight = None if weight_dtype is None else made(COLS, dtype=weight_dtype, seed=3)
        tensors = [made(*X_SHAPE, dtype=x_dtype), made(*SHARING[scale_of], dtype=dtype, seed=1), shift, weight]
        spec = make_spec(**options)
        found = results(modulated_rms_norm, tensors, options)
        same(found, results(steps, tensors, {"spec": spec}))
        with torch.no_grad():
            assert bits_equal(modulated_rms_norm(*tensors, **options), found[0])


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_steps_are_the_formula_and_gradients_are_trees_of_each_sample(dtype, rounding):
    options = {"eps": 1e-5, "weight_offset": 1.0, "rounding": rounding}
    x, weight = made(*X_SHAPE, dtype=dtype), made(COLS, seed=3)
    scale, shift = made(BATCH, 1, COLS, dtype=dtype, seed=1), made(BATCH, 1, COLS, seed=2)
    wide = [t.expand(X_SHAPE) for t in (scale, shift)]  # then autograd has a term for each row
    y, dx, dscale, dshift, dweight = results(written_out, [x, *(t.float() for t in wide), weight], options)
    dscale, dshift = (torch.stack([sum_rows(t) for t in terms]).unsqueeze(1) for terms in (dscale, dshift))
    found = results(modulated_rms_norm, [x, scale, shift, weight], options)
    same(found, [y, dx, dscale.to(dtype), dshift, dweight])


def test_liger_style_formula_lies_within_the_roundings():
    x, scale, shift, weight = made(*X_SHAPE), made(BATCH, 1, COLS, seed=1), made(BATCH, 1, COLS, seed=2), made(COLS)
    n = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    product = n * (1 + scale.double())
    error = (modulated_rms_norm(x, scale, shift, weight).double() - (product + shift)).abs()
    # Rounded are rstd, x_hat, the gain, 1 + scale, the product and the sum: six of 2^-24, relative to no more than
    # |n (1 + scale)| + |shift|; the seventh is for products of those errors and the float64 steps of rstd.
    assert (error <= 7 * 2.0**-24 * (product.abs() + shift.abs())).all()


@pytest.mark.parametrize("sharing", SHARING)
def test_threads_and_batches_change_no_bit(sharing):
    x = made(4, 400, 96)
    scale = made(*{"sample": (4, 1, 96), "token": (4, 400, 96), "position": (400, 96)}.get(sharing, (96,)), seed=1)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(results(modulated_rms_norm, [x, scale, scale, made(96, seed=3)], {}))
    finally:
        torch.set_num_threads(before)
    same(found[1], found[0])
    same(found[2], found[0])
    if sharing == "sample":  # of one sample in a batch, the gradients that it has alone
        alone = results(lambda *t: modulated_rms_norm(*t), [x[:1], scale[:1], scale[:1]], {})
        together = results(lambda *t: modulated_rms_norm(*t), [x[[0, 0]], scale[[0, 0]], scale[[0, 0]]], {})
        assert bits_equal(together[0][1], alone[0][0])
        dy = made(1, 400, 96, seed=9).expand(2, 400, 96)
        leaf = scale[[0, 0]].requires_grad_()
        (dscale,) = torch.autograd.grad(modulated_rms_norm(x[[0, 0]], leaf), leaf, dy)
        assert bits_equal(dscale[0], dscale[1])


def test_strided_rows_and_a_scale_out_of_one_projection():
    x = made(TOKENS, BATCH, 2 * COLS)[..., :COLS].transpose(0, 1)
    scale, shift = made(BATCH, 2 * COLS, seed=1).unsqueeze(1).chunk(2, -1)
    plain = [t.contiguous() for t in (x, scale, shift)]
    same(results(modulated_rms_norm, [x, scale, shift], {}), results(modulated_rms_norm, plain, {}))
    leaves = [x.detach().requires_grad_(), made(BATCH, 2 * COLS, seed=1).requires_grad_()]
    y = modulated_rms_norm(leaves[0], *leaves[1].unsqueeze(1).chunk(2, -1))
    grads = torch.autograd.grad(y, leaves, made(*y.shape, seed=9))
    expected = results(modulated_rms_norm, plain, {})
    same([grads[0], *grads[1].unsqueeze(1).chunk(2, -1)], expected[1:])


def test_several_normalised_dimensions():
    x, scale, weight = made(2, 5, 4, 6), made(2, 1, 4, 6, seed=1), made(4, 6, seed=2)
    flat = modulated_rms_norm(x.flatten(-2), scale.flatten(-2), None, weight.flatten())
    assert bits_equal(modulated_rms_norm(x, scale, None, weight), flat.view_as(x))


def test_gradients_of_every_order_in_float64():
    tensors = [made(2, 3, 5), made(2, 1, 5, seed=1), made(5, seed=2), made(5, seed=3)]
    tensors = [t.double().requires_grad_() for t in tensors]
    assert torch.autograd.gradcheck(modulated_rms_norm, tensors, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(modulated_rms_norm, tensors, check_batched_grad=True)


def test_what_can_be_differentiated_again_has_the_bits_of_what_cannot():
    tensors = [t.requires_grad_() for t in (made(*X_SHAPE), made(BATCH, 1, COLS, seed=1), made(COLS, seed=2))]
    y = modulated_rms_norm(*tensors).square().sum()
    again = torch.autograd.grad(y, tensors, create_graph=True)
    same([t.detach() for t in again], torch.autograd.grad(modulated_rms_norm(*tensors).square().sum(), tensors))
    assert all(t is not None for t in torch.autograd.grad(sum(t.sum() for t in again), tensors))


def test_only_what_is_wanted_is_computed():
    x, scale, shift, weight = made(*X_SHAPE), made(BATCH, 1, COLS), made(COLS), made(COLS)
    every = results(modulated_rms_norm, [x, scale, shift, weight], {})[1:]
    for wanted in itertools.product((False, True), repeat=4):
        if any(wanted):
            leaves = [t.clone().requires_grad_(want) for t, want in zip((x, scale, shift, weight), wanted, strict=True)]
            y = modulated_rms_norm(*leaves)
            found = torch.autograd.grad(y, [t for t in leaves if t.requires_grad], made(*y.shape, seed=9))
            same(found, [t for t, want in zip(every, wanted, strict=True) if want])


def test_function_transforms_and_compiled_code_have_the_same_bits():
    x, scale, shift, weight = made(*X_SHAPE), made(BATCH, 1, COLS, seed=1), made(BATCH, 1, COLS, seed=2), made(COLS)
    expected = results(modulated_rms_norm, [x, scale, shift, weight], {})
    y = torch.vmap(lambda x, scale, shift: modulated_rms_norm(x, scale, shift, weight))(x, scale, shift)
    assert bits_equal(y, expected[0])
    dy = made(*X_SHAPE, seed=9)
    pull_back = torch.func.vjp(modulated_rms_norm, x, scale, shift, weight)[1]
    same(pull_back(dy), expected[1:])
    torch._dynamo.reset()
    same(results(torch.compile(modulated_rms_norm, fullgraph=True), [x, scale, shift, weight], {}), expected)


def test_jagged_sequences_have_the_bits_of_each_alone():
    lengths = (3, 70, 0, 5)
    rows = [made(length, COLS, seed=length) for length in lengths]
    scale, shift = made(4, 1, COLS, seed=1), made(COLS, seed=2)
    leaves = [t.clone().requires_grad_() for t in (scale, shift)]
    y = modulated_rms_norm(torch.nested.nested_tensor(rows, layout=torch.jagged), *leaves)
    dscale, dshift = torch.autograd.grad(y.values(), leaves, made(sum(lengths), COLS, seed=9))
    dy = made(sum(lengths), COLS, seed=9).split(lengths)
    for i, x in enumerate(rows):
        own = scale[i].clone().requires_grad_()
        alone = modulated_rms_norm(x, own, shift)
        assert bits_equal(alone.detach(), y.unbind()[i].detach())
        assert bits_equal(torch.autograd.grad(alone, own, dy[i])[0], dscale[i])
    assert bits_equal(dshift, sum_rows(torch.cat(dy)))


def test_no_rows_have_gradients_of_zero():
    for shape in ((2, 0, COLS), (0, 3, COLS)):
        found = results(modulated_rms_norm, [made(*shape), made(shape[0], 1, COLS), made(COLS), made(COLS)], {})
        assert [tuple(t.shape) for t in found[1:]] == [shape, (shape[0], 1, COLS), (COLS,), (COLS,)]
        assert all((t == 0).all() for t in found)


def test_nothing_of_the_inputs_size_is_kept_but_x():
    x, scale, weight = made(*X_SHAPE).requires_grad_(), made(BATCH, 1, COLS, seed=1).requires_grad_(), made(COLS)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        modulated_rms_norm(x, scale, scale, weight)
    assert [t.data_ptr() for t in kept if t.numel() >= x.numel()] == [x.data_ptr()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"scale": made(COLS - 1)},
            r"scale must end in \(40,\) and broadcast to x's shape \(3, 130, 40\), got \(39,\)",
        ),
        ({"shift": made(2, 1, COLS)}, "shift must end in"),
        ({"shift": made(1, BATCH, 1, COLS)}, "shift must end in"),
        ({"scale": 2.0}, "scale must be a torch.Tensor, got float"),
        ({"scale": torch.ones(COLS, dtype=torch.int64)}, "scale must be"),
        ({"shift": torch.ones(COLS, device="meta")}, "shift must be on x's device cpu, got meta"),
        ({"rounding": "twice"}, "rounding must be one of"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        modulated_rms_norm(**{"x": made(*X_SHAPE), "scale": made(COLS)} | change)


def test_the_module():
    norm = ModulatedRMSNorm(COLS, eps=1e-5, weight_offset=1.0, rounding="before_scale")
    x, scale, shift = made(*X_SHAPE, dtype=torch.bfloat16), made(BATCH, 1, COLS), made(BATCH, 1, COLS, seed=1)
    options = {"weight_offset": 1.0, "rounding": "before_scale"}
    assert bits_equal(
        norm(x, scale, shift).detach(), modulated_rms_norm(x, scale, shift, norm.weight, 1e-5, **options).detach()
    )
    assert repr(norm) == "ModulatedRMSNorm(40, eps=1e-05, weight_offset=1.0, rounding='before_scale')"
    assert ModulatedRMSNorm(COLS, elementwise_affine=False)(x, scale).shape == x.shape
    for other in (torch.float64, torch.float32):
        assert modulated_rms_norm(x.double(), scale.to(other)).dtype == torch.float64
