"""The memory promise: what training keeps, the most it needs at once, and how large results are asked for."""

import os
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from rmsnorm import RMSNorm, add_rms_norm, rms_norm
from rmsnorm.numerics import fixed_sum
from rmsnorm.ops.library import status
from rmsnorm.spec import ROUNDINGS
from tests.support.expected import DTYPES, tensor

SMALL = DTYPES[:3]  # float64 is computed by the reference, in plain PyTorch

kernels = pytest.mark.skipif(not status().compiled, reason="the reference makes tensors of the input's size as it goes")


def saved_by(call):
    """What autograd keeps of a call, and what the call returns."""
    kept = []

    def pack(t):
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        returned = call()
    return kept, returned


def memory(t):
    return t.data_ptr(), t.dtype, t.numel()


def assert_saved(kept, *expected, rows):
    """Exactly these, without a copy, and one float32 per row."""
    (rstd,) = (t for t in kept if t.shape[-1] == 1)
    assert (rstd.dtype, rstd.numel()) == (torch.float32, rows)
    rest = [memory(t) for t in kept if t is not rstd]
    assert sorted(rest, key=str) == sorted((memory(t) for t in expected), key=str)


# ---------------------------------------------------------------- what is kept


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize("w_dtype", SMALL)
def test_training_keeps_x_the_weight_and_one_number_per_row(dtype, w_dtype, rounding):
    weight = tensor(16, dtype=w_dtype, seed=1).requires_grad_()
    for make in (
        lambda: tensor(2, 5, 16, dtype=dtype),
        lambda: tensor(5, 2, 16, dtype=dtype).transpose(0, 1),
        lambda: tensor(2, 5, 48, dtype=dtype)[..., 16:32],
        lambda: tensor(2, 5, 32, dtype=dtype)[..., ::2],
    ):
        x = make().requires_grad_()
        kept, _ = saved_by(lambda x=x: rms_norm(x, weight, rounding=rounding))
        assert_saved(kept, x, weight, rows=10)
        kept, (_, h) = saved_by(lambda x=x: add_rms_norm(x, x, weight, rounding=rounding))
        assert_saved(kept, h, weight, rows=10)


@pytest.mark.parametrize("dtype", SMALL)
def test_nothing_is_kept_for_what_has_no_weight_or_no_gradient(dtype):
    x = tensor(10, 16, dtype=dtype)
    leaf = x.clone().requires_grad_()
    kept, _ = saved_by(lambda: rms_norm(leaf))
    assert_saved(kept, leaf, rows=10)
    kept, (_, h) = saved_by(lambda: add_rms_norm(leaf, x))
    assert_saved(kept, h, rows=10)
    with torch.no_grad():
        assert saved_by(lambda: rms_norm(leaf))[0] == []
    assert saved_by(lambda: rms_norm(x))[0] == []


@pytest.mark.parametrize("dims", [1, 2])
def test_weights_of_several_dimensions_are_not_copied(dims):
    x, weight = tensor(6, 3, 4).requires_grad_(), tensor(*(3, 4)[-dims:], seed=1).requires_grad_()
    kept, _ = saved_by(lambda: rms_norm(x, weight))
    assert_saved(kept, x, weight, rows=6 if dims == 2 else 18)


@pytest.mark.parametrize("dtype", SMALL)
def test_memory_efficient_keeps_y_in_place_of_x(dtype):
    norm = RMSNorm(16, memory_efficient=True)
    x = tensor(10, 16, dtype=dtype).requires_grad_()
    kept, y = saved_by(lambda: norm(x))
    assert_saved(kept, y, norm.weight, rows=10)
    with torch.no_grad():
        norm.weight[3] = 0  # of whose column y keeps nothing
    kept, _ = saved_by(lambda: norm(x))
    assert_saved(kept, x, norm.weight, rows=10)
    # With a residual h is kept, which is an output anyway.
    kept, (_, h) = saved_by(lambda: norm(x, x))
    assert_saved(kept, h, norm.weight, rows=10)


# ---------------------------------------------------------------- the most at once


@pytest.fixture(autouse=True)
def silent(capfd):
    """PyTorch's profiler writes to stderr."""
    yield
    capfd.readouterr()


def allocations(step, forget=lambda: None):
    """Bytes taken from PyTorch's CPU allocator, and given back as negative numbers, in order.

    The profiler hears of every allocation of that allocator, whoever asks for it: the kernels' go through it too.
    What does not go through it is seen by the test of the process's own high-water mark below.
    """
    step()  # what the first call alone needs is not the step's
    forget()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    return [event.nbytes() for event in events if event.name() == "[memory]"]


def most(step, forget):
    return max(accumulate(allocations(step, forget)), default=0)


def size(*tensors):
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


SHAPES = [(1024, 384), (4096, 1024), (16, 16384)]


@kernels
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize("mode", ["norm", "add", "frozen", "memory efficient", "memory efficient add", "sliced"])
def test_training_needs_what_it_keeps_and_returns_and_little_more(mode, dtype, shape):
    x = tensor(*shape, dtype=dtype)
    residual, dy = x.clone(), x.clone()
    leaf = x if mode != "sliced" else torch.cat([x, x], -1)[:, shape[1] :].detach()
    leaf.requires_grad_()
    norm = RMSNorm(shape[1], memory_efficient=mode.startswith("memory"), dtype=dtype)
    norm.requires_grad_(mode != "frozen")
    results = {}

    def forget():
        results.clear()
        leaf.grad = norm.weight.grad = None

    def step():
        if mode.endswith("add"):
            y, h = norm(leaf, residual)
            torch.autograd.backward([y, h], [dy, dy])
        else:
            y, h = norm(leaf), None
            y.backward(dy)
        results.update(y=y, h=h)

    # Of what is kept, h and y are outputs and x was there before; rstd is new.
    peak = most(step, forget)
    rstd = 4 * shape[0]
    new = rstd + size(results["y"], results["h"], leaf.grad, norm.weight.grad)
    # What else there is are float32 rows: the gain, and for each thread the rows that it has in flight and the sums
    # that wait for their neighbour, one on each level of the tree. Beside many rows that is a twentieth of x at most.
    levels = fixed_sum.leaves(shape[0]).bit_length() - 1
    rows = 1 + (levels + 5) * torch.get_num_threads()
    assert peak <= new + 4 * shape[1] * rows
    if shape[0] >= 1024:
        assert peak <= new + 0.05 * (size(x) + rstd)


@kernels
@pytest.mark.parametrize("dtype", SMALL)
def test_inference_takes_its_result_and_nothing_else(dtype):
    x, weight, out = tensor(256, 1024, dtype=dtype), tensor(1024), torch.empty(256, 1024, dtype=dtype)
    sliced = torch.cat([x, x], -1)[:, 1024:]
    transposed = x.view(16, 16, 1024).transpose(0, 1)
    for given in (x, sliced, transposed):
        assert [n for n in allocations(lambda given=given: rms_norm(given, weight)) if n > 0] == [size(x)]
    assert [n for n in allocations(lambda: rms_norm(x, weight, out=out)) if n > 0] == []
    assert [n for n in allocations(lambda: rms_norm(x, weight, out=x)) if n > 0] == []
    taken = [n for n in allocations(lambda: add_rms_norm(x, x, weight)) if n > 0]
    assert sorted(taken) == [4 * 256, size(x), size(x)]


PROCESS = """
import sys
import torch
from rmsnorm import rms_norm

def high_water():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))

dtype = getattr(torch, sys.argv[1])
x = torch.ones(8192, 1024, dtype=dtype, requires_grad=True)
weight = torch.ones(1024, requires_grad=True)
dy = torch.ones(8192, 1024, dtype=dtype)
small = torch.ones(64, 1024, dtype=dtype, requires_grad=True)
rms_norm(small, weight).backward(dy[:64])  # what the first call alone needs: threads, modules that backward imports
weight.grad = None
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # sets the mark to what is resident now
before = high_water()
y = rms_norm(x, weight)
y.backward(dy)
print(high_water() - before, y.nbytes + x.grad.nbytes + weight.grad.nbytes + 4 * 8192, x.nbytes)
"""


def run(script, *arguments):
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@kernels
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's high-water mark")
def test_the_process_grows_by_no_more():
    grown, returned, x = map(int, run(PROCESS, "float32"))
    # Pages are counted: each of the two large results may begin and end within a huge page of 2 MiB.
    assert grown <= returned + 0.05 * x + 8 * 2**20


# ---------------------------------------------------------------- huge pages

MAPS = """
import sys
import torch
from rmsnorm import add_rms_norm, rms_norm

def advised(t):
    middle = t.data_ptr() + t.nbytes // 2
    inside = False
    for line in open("/proc/self/smaps").read().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= middle < end
        elif inside and first == "VmFlags:":
            return "hg" in line.split()

# The small ones first: memory that was advised once stays so when it is used again.
kept = [rms_norm(torch.ones(mib << 8, 1024)) for mib in (1, 2, 3)]
kept += [torch.empty(8 << 20)]
print(*(advised(t) for t in kept))
x = torch.ones(8 << 8, 1024).requires_grad_()
y, h = add_rms_norm(x.detach(), x.detach())
rms_norm(x).backward(y)
print(*(advised(t) for t in (rms_norm(x.detach()), rms_norm(x.detach().bfloat16()), y, h, x.grad)))
"""


@kernels
@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no transparent huge pages"
)
def test_large_results_ask_for_huge_pages_and_small_ones_do_not():
    # 1, 2 and 3 MiB are not advised, nor what PyTorch takes; 8 and 4 MiB are.
    assert run(MAPS) == ["False"] * 4 + ["True"] * 5
