"""Level 2: every operator of every instruction set gives the reference's bits, wherever and however its rows lie.

Most cases are in kernel_cases.py. They are run by one process for each instruction set, because that is chosen once
per process; what this file asks of the operators directly does not depend on it.
"""

import json
import mmap
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from rmsnorm.ops import library
from tests.kernels import kernel_cases
from tests.kernels.kernel_calls import plain_weight
from tests.support import reference
from tests.support.bits import bits_equal
from tests.support.rows import DTYPES, all_rows, generator, random_rows

ROOT = Path(__file__).parents[2]
ops = torch.ops.rmsnorm
MAP_NORESERVE = 0x4000  # Linux; the mmap module has it from Python 3.13 on

# Without kernels there is nothing to compare, and that must not look like success.
ISAS = library.status().isas or ["none"]


@pytest.fixture(scope="session")
def cases(tmp_path_factory, with_threads):
    directory = tmp_path_factory.mktemp("cases")
    with with_threads(1):  # many short calls, for which waiting threads are in the way
        kernel_cases.save(directory)
    yield directory
    shutil.rmtree(directory)  # hundreds of MB, which pytest would keep for three sessions


@pytest.fixture(scope="session")
def failures(cases):
    """`failures(isa)`: {group: [what differs, ...]} from a process that uses that instruction set."""
    found = {}

    def of(isa):
        if isa not in found:
            assert isa != "none", f"the kernels are not compiled: {library.status().reason}"
            process = run_with_isa(isa, "-m", "tests.kernels.kernel_worker", str(cases))
            assert process.returncode == 0, process.stderr
            report = json.loads(process.stdout)
            assert report["isa"] == isa
            found[isa] = report["failures"]
        return found[isa]

    return of


def run_with_isa(isa, *arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        # On fewer cores than threads, spinning at a barrier keeps others from reaching it.
        env={**os.environ, "RMSNORM_ISA": isa, "OMP_WAIT_POLICY": "passive"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("group", [*kernel_cases.GROUPS, "environment"])
@pytest.mark.parametrize("isa", ISAS)
def test_kernels_give_the_bits_of_the_reference(failures, isa, group):
    found = failures(isa)[group]
    assert not found, f"{len(found)} differences, the first of them:\n" + "\n".join(found[:10])


@pytest.mark.parametrize("name", ["avx10", "AVX2", "portable,avx2", "no such thing"])
def test_an_unknown_instruction_set_is_an_error_that_names_those_allowed(name):
    process = run_with_isa(name, "-c", "import rmsnorm")
    assert process.returncode == 1
    message = process.stderr.strip().splitlines()[-1]
    assert message.startswith(f"ValueError: RMSNORM_ISA={name} is not an instruction set of this machine")
    assert message.endswith("choose from " + ",".join(ISAS))


def test_an_empty_instruction_set_means_the_best():
    process = run_with_isa("", "-c", "import rmsnorm.ops.library as o; print(o.status().isa)")
    assert process.stdout.strip() == ISAS[0], process.stderr


# ---------------------------------------------------------------- one row, one answer


def everything(x, weight, dy):
    """Every result that a row determines by itself: y, rstd, h and dx."""
    y, rstd = ops.forward_train(x, weight, 1e-6, 0.0, 0)
    y_of_sum, h, rstd_of_sum = ops.add_forward(x, dy.to(x.dtype), weight, 1e-6, 0.0, 0)
    dx, _ = ops.backward(dy, x, rstd, weight, 0.0, None, None, True, False)
    return y, rstd, y_of_sum, h, rstd_of_sum, dx


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 64, 1000, 4093])
def test_a_row_is_the_same_alone_and_in_a_batch_of_257(width, dtype):
    special = all_rows(width, dtype)
    x = torch.cat([special, random_rows(257 - len(special), width, dtype, seed=1)])
    dy = random_rows(257, width, dtype, seed=2)
    weight = plain_weight(width, torch.float32)
    batch = everything(x, weight, dy)
    for row in range(257):
        alone = everything(x[row : row + 1], weight, dy[row : row + 1])
        assert all(bits_equal(b[row : row + 1], a) for b, a in zip(batch, alone, strict=True)), row


@pytest.mark.parametrize("threads", [1, 2])
def test_permuted_rows_permute_the_results(threads, assert_bits_equal, with_threads):
    x, dy = all_rows(4093, torch.bfloat16), random_rows(len(all_rows(4093, torch.bfloat16)), 4093, torch.bfloat16, 1)
    weight = plain_weight(4093, torch.float32)
    order = torch.randperm(len(x), generator=generator(3))
    with with_threads(threads):
        for given, permuted in zip(everything(x, weight, dy), everything(x[order], weight, dy[order]), strict=True):
            assert_bits_equal(permuted, given[order])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 17, 127, 4096, 16385])
def test_permuted_elements_permute_the_results(width, dtype, assert_bits_equal):
    """The sharpest test of the contract: no sum may depend on the order of its terms."""
    x = all_rows(width, dtype)
    dy = random_rows(len(x), width, dtype, seed=1)
    weight = plain_weight(width, dtype)
    order = torch.randperm(width, generator=generator(2))
    given = everything(x, weight, dy)
    permuted = everything(x[:, order], weight[order], dy[:, order])
    for a, b in zip(given, permuted, strict=True):
        assert_bits_equal(b, a[:, order] if a.shape[1] == width else a)


def test_fused_add_is_the_add_and_then_the_norm(assert_bits_equal):
    for dtype in DTYPES:
        x = all_rows(1000, dtype)
        residual, weight = x.flip(0), plain_weight(1000, dtype)
        y, h, rstd = ops.add_forward(x, residual, weight, 1e-6, 0.0, 0)
        assert_bits_equal(h, x + residual)
        y_of_h, rstd_of_h = ops.forward_train(h, weight, 1e-6, 0.0, 0)
        assert_bits_equal(y, y_of_h)
        assert_bits_equal(rstd, rstd_of_h)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_change_nothing(threads, assert_bits_equal, with_threads):
    x, dy = random_rows(1111, 257, torch.float32, 1), random_rows(1111, 257, torch.float32, 2)
    weight = plain_weight(257, torch.float32)

    def run(n):
        with with_threads(n):
            y, rstd = ops.forward_train(x, weight, 1e-6, 0.0, 0)
            return (y, rstd, *ops.backward(dy, x, rstd, weight, 0.0, None, None, True, True))

    for one, many in zip(run(1), run(threads), strict=True):
        assert_bits_equal(many, one)


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_more_than_two_to_the_31_elements_apart(dtype, assert_bits_equal):
    """Offsets are 64-bit. The memory between the rows is reserved and never touched."""
    width, stride, rows = 1000, 2**31 + 24, 3
    room = ((rows - 1) * stride + width) * dtype.itemsize
    memory = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    far = torch.frombuffer(memory, dtype=dtype).as_strided((rows, width), (stride, 1))
    near = random_rows(rows, width, dtype, seed=1)
    far.copy_(near)
    weight = plain_weight(width, dtype)
    y, rstd = reference.forward(near, weight, 1e-6, 0.0, "once")
    dx, dweight = reference.backward(near, near, rstd, weight, 0.0)
    assert_bits_equal(ops.forward(far, weight, 1e-6, 0.0, 0), y)
    for dy, x in ((near, far), (far, near)):
        found = ops.backward(dy, x, rstd, weight, 0.0, None, None, True, True)
        assert_bits_equal(found[0], dx)
        assert_bits_equal(found[1], dweight)
    ops.forward_out(far, weight, 1e-6, far)
    assert_bits_equal(far.clone(), y)


def test_outputs_keep_the_layout_of_dense_inputs_and_are_contiguous_otherwise():
    """What torch.empty_like gives: a transposed batch stays transposed, a slice does not drag its gaps along."""
    base = torch.randn(4, 6, 10)
    for x in (base, base.transpose(0, 1), base[:, ::2], base[0].expand(4, 6, 10)):
        y, rstd = ops.forward_train(x, None, 1e-6, 0.0, 0)
        assert y.stride() == torch.empty_like(x).stride(), x.stride()
        assert rstd.shape == (*x.shape[:-1], 1)
        assert rstd.is_contiguous()


@pytest.mark.parametrize(
    "arguments",
    [
        (torch.ones(2, 4), torch.ones(3), 1e-6, 0.0, 0),
        (torch.ones(2, 4), torch.ones(2, 4), 1e-6, 0.0, 0),
        (torch.ones(2, 4), torch.ones(1), 1e-6, 0.0, 0),
        (torch.ones(2, 0), None, 1e-6, 0.0, 0),
        (torch.ones(()), None, 1e-6, 0.0, 0),
        (torch.ones(2, 4), None, 1e-6, 0.0, 3),
        (torch.ones(2, 4), None, 1e-6, 0.0, -1),
        (torch.ones(2, 4, dtype=torch.int32), None, 1e-6, 0.0, 0),
        (torch.ones(2, 4, dtype=torch.float64), None, 1e-6, 0.0, 0),
        (torch.ones(2, 4), torch.ones(4, dtype=torch.float64), 1e-6, 0.0, 0),
        (torch.ones(2, 4), torch.ones(4, device="meta"), 1e-6, 0.0, 0),
    ],
)
def test_operators_refuse_what_would_read_or_write_elsewhere(arguments):
    """The friendly messages are functional.py's; the operators themselves only have to be safe."""
    for call in (ops.forward, ops.forward_train, partial(ops.add_forward, arguments[0])):
        with pytest.raises((RuntimeError, ValueError)):
            call(*arguments)


def test_backward_refuses_what_does_not_fit_together():
    x, rstd, weight = torch.ones(2, 4), torch.ones(2, 1), torch.ones(4)
    wrong = [
        (torch.ones(2, 3), x, rstd, weight, None, None),
        (torch.ones(3, 4), x, rstd, weight, None, None),
        (x, x, torch.ones(3, 1), weight, None, None),
        (x, x, torch.ones(2, 1, dtype=torch.float64), weight, None, None),
        (x, x, rstd, torch.ones(5), None, None),
        (x, x, rstd, weight, torch.ones(2, 3), None),
        (x, x, rstd, weight, torch.ones(2, 4, dtype=torch.bfloat16), None),
        (x, x, rstd, weight, None, torch.float64),
        (x, x, rstd, weight, None, torch.int32),
    ]
    for dy, x_given, rstd_given, weight_given, dh, rebuilt in wrong:
        with pytest.raises(RuntimeError):
            ops.backward(dy, x_given, rstd_given, weight_given, 0.0, dh, rebuilt, True, True)


def test_out_must_fit():
    x = torch.ones(2, 4)
    for out in (torch.ones(2, 5), torch.ones(8), torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(2, 8)[:, ::2]):
        with pytest.raises(RuntimeError, match=r"out must|adjacent columns"):
            ops.forward_out(x, None, 1e-6, out)
