"""Bits do not depend on threads: neither on PyTorch's, nor on those that call."""

import threading

import pytest
import torch

from rmsnorm import RMSNorm, add_rms_norm, rms_norm
from tests.support.bits import bits_equal
from tests.support.expected import DTYPES, tensor

CALLERS = 8


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    """PyTorch's own number of threads: above the machine's cores too."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def everything(x, residual, weight, dy):
    """All that a step of training and one of inference make."""
    a, b, c = (t.clone().requires_grad_() for t in (x, residual, weight))
    y, h = add_rms_norm(a, b, c, weight_offset=1.0)
    z = rms_norm(y, c)
    torch.autograd.backward([z, h], [dy, dy])
    norm = RMSNorm(x.shape[-1], memory_efficient=True)
    leaf = x.clone().requires_grad_()
    norm(leaf).backward(dy)
    out = torch.empty_like(x)
    rms_norm(x, weight, out=out)
    return [t.detach() for t in (y, h, z, a.grad, c.grad, leaf.grad, norm.weight.grad, out, rms_norm(x, weight))]


def problem(dtype, rows=300, width=1024, seed=0):
    """Enough elements for several threads, in rows that do not divide evenly."""
    x, residual, dy = (tensor(rows, width, dtype=dtype, seed=seed + i) for i in range(3))
    return x, residual, tensor(width, seed=seed + 3), dy


@pytest.fixture(scope="module")
def alone():
    """Made with one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    found = {dtype: everything(*problem(dtype)) for dtype in DTYPES[:3]}
    torch.set_num_threads(before)
    return found


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_any_number_of_threads_gives_the_bits_of_one(dtype, threads, alone):
    for found, expected in zip(everything(*problem(dtype)), alone[dtype], strict=True):
        assert bits_equal(found, expected)


@pytest.mark.parametrize("shape", [(1, 200_000), (70_000, 3), (257, 333), (33, 4096)])
def test_shapes_that_do_not_divide_among_threads(shape, threads):
    given = problem(torch.bfloat16, *shape, seed=7)
    found = everything(*given)
    torch.set_num_threads(1)
    for a, b in zip(found, everything(*given), strict=True):
        assert bits_equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_callers_at_once_get_the_bits_of_one(dtype, threads, alone):
    given = problem(dtype)
    small = problem(dtype, 3, 40)
    small_alone = everything(*small)
    barrier = threading.Barrier(CALLERS)
    wrong, errors = [], []

    def call(caller):
        try:
            torch.set_num_threads(threads)  # PyTorch keeps it per thread
            barrier.wait()
            for _ in range(2):
                # Callers of different sizes meet in the same kernels.
                arguments, expected = (given, alone[dtype]) if caller % 2 else (small, small_alone)
                found = everything(*arguments)
                wrong.extend(caller for a, b in zip(found, expected, strict=True) if not bits_equal(a, b))
        except BaseException as error:
            errors.append(error)

    callers = [threading.Thread(target=call, args=(caller,)) for caller in range(CALLERS)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not errors
    assert not wrong


def test_one_module_shared_by_callers():
    norm = RMSNorm(256)
    x = tensor(64, 256)
    expected = norm(x).detach()
    found = [None] * CALLERS

    def call(caller):
        with torch.no_grad():
            found[caller] = [norm(x) for _ in range(50)]

    callers = [threading.Thread(target=call, args=(caller,)) for caller in range(CALLERS)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(bits_equal(y, expected) for ys in found for y in ys)


def test_floating_point_environment_is_given_back(threads):
    # The kernels round toward zero inside; what runs after them in the same threads must not.
    ones, subnormal = torch.ones(200_000), torch.full((200_000,), 1e-40)
    one, ten = 1.0, 10.0
    third = ones / 3
    x = tensor(2000, 100, dtype=torch.bfloat16).requires_grad_()
    rms_norm(x, tensor(100)).sum().backward()
    assert bits_equal(ones / 3, third)
    assert bits_equal(subnormal * 1.0, subnormal)
    assert (one / ten).hex() == "0x1.999999999999ap-4"  # rounded up
