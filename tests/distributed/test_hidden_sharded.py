"""Rows that a process group shares, as plain tensors, on four processes that talk over gloo."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.testing._internal.distributed.fake_pg import FakeStore

from rmsnorm.distributed.hidden_sharded import HiddenShardedRMSNorm, hidden_sharded_rms_norm
from tests.distributed.hidden_sharded_checks import CHECKS, RANKS, work


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
def test_four_processes(name, outcomes):
    said = outcomes.get(name, [])
    assert said == [None] * RANKS, "\n".join(filter(None, said)) or "not reached"


@pytest.fixture
def one_of_many():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_of_many")
@pytest.mark.parametrize("hidden_size", [7, 8.0, "8"])
def test_a_row_has_at_least_this_ranks_columns(hidden_size):
    with pytest.raises(ValueError, match="hidden_size must be an int of at least this rank's 8 columns"):
        hidden_sharded_rms_norm(torch.randn(2, 8), hidden_size=hidden_size)


@pytest.mark.parametrize("option", [{"group_size": 4}, {"memory_efficient": True}])
def test_what_needs_whole_rows_is_refused(option):
    with pytest.raises(ValueError, match="cannot be had where a row lies on several ranks"):
        HiddenShardedRMSNorm(8, **option)
