"""Autocast, scaled gradients, default dtypes, deterministic mode; nested, meta and fake tensors, subclasses."""

import contextlib
import itertools

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from rmsnorm import RMSNorm, add_rms_norm, rms_norm
from rmsnorm.ops.library import status
from tests.support.bits import difference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert (found := difference(a, b)) is None, found


# ---------------------------------------------------------------- precision


@pytest.mark.parametrize(("dtype", "weight_dtype", "autocast"), list(itertools.product(DTYPES, DTYPES, DTYPES[1:])))
def test_autocast_changes_nothing(dtype, weight_dtype, autocast):
    x, residual = torch.randn(3, 16).to(dtype).requires_grad_(), torch.randn(3, 16).to(dtype)
    weight = torch.randn(16).to(weight_dtype).requires_grad_()
    expected = rms_norm(x, weight), *add_rms_norm(x, residual, weight)
    gradients = torch.autograd.grad(expected[0].sum(), (x, weight))
    with torch.autocast("cpu", autocast):
        y = rms_norm(x, weight)
        same([y, *add_rms_norm(x, residual, weight)], expected)
    same(torch.autograd.grad(y.sum(), (x, weight)), gradients)
    assert [t.dtype for t in gradients] == [dtype, weight_dtype]


def test_scaled_gradients_train():
    norm, linear = RMSNorm(16), nn.Linear(16, 16)
    optimizer = torch.optim.SGD([*norm.parameters(), *linear.parameters()], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = norm.weight.detach().clone()
    with torch.autocast("cpu", torch.float16):
        y = norm(linear(torch.randn(4, 16)))
    assert y.dtype == torch.float16
    scaler.scale(y.float().square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(norm.weight, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_is_the_parameters(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        norm = RMSNorm(8)
        assert norm.weight.dtype == dtype
        assert norm(torch.ones(2, 8)).dtype == dtype
        x = torch.randn(2, 8, dtype=torch.float32)
        y = rms_norm(x)
    finally:
        torch.set_default_dtype(before)
    same([y], [rms_norm(x)])


def test_deterministic_mode_has_nothing_to_say():
    torch.use_deterministic_algorithms(True)
    try:
        x, weight = torch.randn(300, 16, requires_grad=True), torch.randn(16, requires_grad=True)
        y, h = add_rms_norm(x, x.detach(), weight)
        (y + h).sum().backward()
        rms_norm(x.detach(), weight.detach(), out=torch.empty(300, 16))
        (dx,) = torch.autograd.grad(rms_norm(x, weight).square().sum(), x, create_graph=True)
        dx.square().sum().backward()
        RMSNorm(16, memory_efficient=True)(x).sum().backward()
        torch.func.vmap(torch.func.grad(lambda w, x: rms_norm(x, w).sum()), (None, 0))(weight.detach(), x.detach())
        rms_norm(jagged(2, 5), torch.ones(8)).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def flushing():
    """A context manager: inside, this thread takes subnormal numbers for zero."""

    @contextlib.contextmanager
    def flush():
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor cannot flush subnormals")
        try:
            yield
        finally:
            torch.set_flush_denormal(False)

    return flush


def of_subnormals(dtype):
    """x, weight and dy with subnormal numbers among them, and a row of nothing else."""
    tiny = torch.finfo(dtype).smallest_normal / 4
    x, weight, dy = torch.randn(5, 64).to(dtype), torch.randn(64).to(dtype), torch.randn(5, 64).to(dtype)
    x[1] *= tiny
    x[2, 3] = weight[5] = dy[2, 7] = tiny
    return x, weight, dy


def everything(x, weight, dy):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y, h = add_rms_norm(x, torch.zeros_like(x), weight, 1e-30)
    plain = rms_norm(x, weight, 1e-30)
    # Apart from each other: their sum would be PyTorch's.
    return (
        *(y, h, plain),
        *torch.autograd.grad((y, h), (x, weight), (dy, dy)),
        *torch.autograd.grad(plain, (x, weight), dy),
    )


@pytest.mark.skipif(not status().compiled, reason="the reference is plain PyTorch, which flushes")
@pytest.mark.parametrize("dtype", DTYPES)
def test_flushing_subnormals_changes_no_bit_of_the_kernels(dtype, flushing):
    given = of_subnormals(dtype)
    expected = everything(*given)
    assert (expected[0][1] != 0).any()  # the row of subnormals
    with flushing():
        found = everything(*given)
        # It is still in force for what comes after.
        assert (torch.tensor(1e-40) * 1).item() == 0
    same(found, expected)


def test_flushing_subnormals_makes_them_zero_in_what_plain_pytorch_computes(flushing):
    x, weight, dy = of_subnormals(torch.float64)
    flushed = [torch.where(t.abs() < torch.finfo(t.dtype).smallest_normal, t * 0, t) for t in (x, weight, dy)]
    expected = everything(*flushed)
    with flushing():
        found = everything(x, weight, dy)
    same(found, expected)


# ---------------------------------------------------------------- kinds of tensors


def jagged(*lengths, dtype=torch.float32):
    parts = [torch.randn(length, 8).to(dtype) for length in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)


def test_jagged_tensors_have_the_bits_of_their_parts():
    x, residual, weight = jagged(2, 0, 5), None, torch.randn(8, requires_grad=True)
    y = rms_norm(x, weight)
    assert y.is_nested
    same(y.unbind(), [rms_norm(part, weight) for part in x.unbind()])
    assert (y + x).is_nested  # the same raggedness, as PyTorch sees it
    residual = torch.nested.nested_tensor_from_jagged(torch.randn(7, 8), x.offsets())
    y, h = RMSNorm(8)(x, residual)
    same([y.values(), h.values()], add_rms_norm(x.values(), residual.values(), torch.ones(8)))
    (gradient,) = torch.autograd.grad((rms_norm(x, weight) * 2).values().sum(), weight)
    (expected,) = torch.autograd.grad((rms_norm(x.values().detach(), weight) * 2).sum(), weight)
    same([gradient], [expected])


def test_jagged_tensors_of_every_shape():
    def parts_agree(x, weight):
        torch.testing.assert_close(
            list(rms_norm(x, weight).unbind()), [rms_norm(part.contiguous(), weight) for part in x.unbind()]
        )

    offsets = torch.tensor([0, 3, 7, 12])
    several = torch.nested.nested_tensor([torch.randn(2, 4, 8), torch.randn(5, 4, 8)], layout=torch.jagged)
    parts_agree(several, torch.randn(8))
    parts_agree(several, torch.randn(4, 8))
    parts_agree(several.transpose(1, 2), torch.randn(8))
    with_gaps = torch.nested.nested_tensor_from_jagged(torch.randn(12, 8), offsets, lengths=torch.tensor([2, 4, 3]))
    parts_agree(with_gaps, torch.randn(8))
    # PyTorch's own mean over a ragged dimension is that of something else.
    with pytest.raises(ValueError, match="the normalised dimensions must not be ragged, got x of shape"):
        rms_norm(torch.nested.nested_tensor_from_jagged(torch.randn(2, 12), offsets, jagged_dim=2))


def test_jagged_tensors_compile():
    x, weight = jagged(2, 0, 5), torch.randn(8, requires_grad=True)
    compiled = torch.compile(rms_norm, backend="aot_eager", fullgraph=True)
    found, expected = (
        (y.values(), *torch.autograd.grad(y.values().sum(), (x, weight)))
        for y in (compiled(x, weight), rms_norm(x, weight))
    )
    same([found[0], found[1].values(), found[2]], [expected[0], expected[1].values(), expected[2]])


def test_a_residual_of_another_raggedness_is_refused():
    with pytest.raises(ValueError, match="residual must have x's shape"):
        add_rms_norm(jagged(2, 5), jagged(3, 4))


class Named(torch.Tensor):
    """A subclass that follows its data through `__torch_function__`, as most do."""


class Counted(torch.Tensor):
    """A subclass that sees every operation, and knows none but PyTorch's own."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)

    def __init__(self, data):
        self.data_inside = data

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function.namespace != "aten":
            raise NotImplementedError(f"{function} is none of PyTorch's")
        plain = [a.data_inside if isinstance(a, Counted) else a for a in args]
        return cls(function(*plain, **(kwargs or {})))


def test_subclasses_stay_what_they_are():
    x, weight = torch.randn(3, 8), torch.randn(8)
    y = rms_norm(x.as_subclass(Named), weight)
    assert type(y) is Named
    same([y.as_subclass(torch.Tensor)], [rms_norm(x, weight)])
    y = rms_norm(Counted(x), weight)
    assert type(y) is Counted
    torch.testing.assert_close(y.data_inside, rms_norm(x, weight))
    with pytest.raises(TypeError, match="out must be a plain"):
        rms_norm(x, weight, out=Counted(x))


def test_meta_and_fake_tensors_carry_shape_dtype_and_gradients():
    x = torch.randn(3, 8, device="meta", dtype=torch.bfloat16, requires_grad=True)
    y, h = RMSNorm(8, device="meta")(x, x.detach())
    assert (y.shape, y.dtype, y.device.type, h.dtype) == ((3, 8), torch.bfloat16, "meta", torch.bfloat16)
    (y + h).sum().backward()
    assert x.grad.is_meta
    with FakeTensorMode():
        norm = RMSNorm(8)
        y = norm(torch.randn(3, 8))
        y.sum().backward()
        assert y.shape == (3, 8)
        assert norm.weight.grad.shape == (8,)
