"""DTensor, sequence parallelism, FSDP2 and hidden-dimension sharding, on eight processes that talk over gloo."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from rmsnorm import RMSNorm, rms_norm
from tests.distributed.distributed_checks import CHECKS, RANKS, work


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Check -> what each rank says of it: None where it passed."""
    results = multiprocessing.get_context("spawn").Manager().Queue()
    store = tmp_path_factory.mktemp("gloo") / "store"
    with contextlib.suppress(multiprocessing.ProcessRaisedException):  # it is in the queue too
        multiprocessing.spawn(work, (str(store), results), nprocs=RANKS)
    found = {}
    while not results.empty():
        name, outcome = results.get()
        found.setdefault(name, []).append(outcome)
    return found


@pytest.mark.parametrize("name", CHECKS)
def test_eight_processes(name, outcomes):
    said = outcomes.get(name, [])
    assert said == [None] * RANKS, "\n".join(filter(None, said)) or "not reached"


# ---------------------------------------------------------------- what 1024 ranks would send


class Traffic(TorchDispatchMode):
    """Records each collective and the bytes that a rank gives it."""

    def __enter__(self):
        self.seen = []
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        if (
            function.namespace == "_c10d_functional"
            and "wait" not in function.__name__
            and "_wrap" not in function.__name__
        ):
            self.seen.append((function.__name__.split(".")[0], args[0].nbytes))
        return function(*args, **(kwargs or {}))


@pytest.fixture
def mesh_of_1024():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1024)
    yield init_device_mesh("cpu", (1024,))
    dist.destroy_process_group()


def traffic(function, mesh, shape, weight_shape, placement, weight_placement):
    """Of the forward, the backward and a step of AdamW, for one rank's parts of these shapes."""

    def sharded(shape, placement):
        local = torch.randn(shape, dtype=torch.bfloat16)
        return DTensor.from_local(local, mesh, [placement], run_check=False).requires_grad_()

    x, weight = sharded(shape, placement), sharded(weight_shape, weight_placement)
    with Traffic() as forward:
        y = function(x, weight)
    with Traffic() as backward:
        y.backward(torch.ones_like(y))
    with Traffic() as step:
        torch.optim.AdamW([weight]).step()
    return forward.seen, backward.seen, step.seen


def stock(x, weight):
    return torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-6)


def test_batch_sharding_sums_dweight_once_where_stock_reduces_it_in_every_step_of_the_optimizer(mesh_of_1024):
    given = (mesh_of_1024, (1, 64, 4096), (4096,), Shard(0), Replicate())
    # Ours are float32 sums, which are rounded to bfloat16 when they are whole.
    exchange = [("all_to_all_single", 4096 * 4), ("all_gather_into_tensor", 4 * 4)]
    assert traffic(rms_norm, *given) == ([], exchange, [])
    assert traffic(stock, *given) == ([], [], [("all_reduce", 4096 * 2)] * 3)


def test_a_few_rows_each_are_exchanged_themselves(mesh_of_1024):
    exchange = [("all_to_all_single", 16 * 4096 * 4), ("all_gather_into_tensor", 4 * 4)]
    assert traffic(rms_norm, mesh_of_1024, (1, 16, 4096), (4096,), Shard(0), Replicate()) == ([], exchange, [])


def test_hidden_sharding_sends_numbers_per_row_and_never_gathers(mesh_of_1024):
    rows = 16
    given = (mesh_of_1024, (1, rows, 64), (64,), Shard(2), Shard(0))
    number = ("all_reduce", rows * 8)
    two_numbers = ("all_reduce", rows * 16)
    assert traffic(rms_norm, *given) == ([number, number], [two_numbers, number], [])
    with pytest.raises(RuntimeError, match="in-place operations that require placement changes are not supported"):
        traffic(stock, *given)


def test_the_mark_of_megatrons_trainers_survives_a_move():
    norm = RMSNorm(8, sequence_parallel=True)
    assert norm.weight.sequence_parallel is True
    assert norm.to(torch.bfloat16).weight.sequence_parallel is True
