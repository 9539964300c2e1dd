"""Plain tensors and a process group: what four processes check together (test_hidden_sharded.py)."""

import itertools
import traceback

import torch
import torch.distributed as dist

from rmsnorm import rms_norm
from rmsnorm.distributed.hidden_sharded import (
    HiddenShardedRMSNorm,
    hidden_sharded_add_rms_norm,
    hidden_sharded_rms_norm,
)
from tests.distributed.distributed_checks import PAIRS, one_process, same, tensors

RANKS = 4


def part(t, sizes, rank):
    return t.split(sizes, -1)[rank].contiguous()


def sharded(group, sizes, given, module=False, **options):
    """This rank's columns of y, h, dx, dresidual and dweight."""
    rank = dist.get_rank(group)
    x, residual, weight, dy, dh = (part(t, sizes, rank) for t in given)
    x, residual, weight = (t.detach().requires_grad_() for t in (x, residual, weight))
    options |= {"process_group": group}
    if len(set(sizes)) > 1:
        options["hidden_size"] = sum(sizes)
    if module:
        norm = HiddenShardedRMSNorm(sizes[rank], 1e-6, dtype=weight.dtype, **options)
        norm.weight = torch.nn.Parameter(weight.detach())
        weight = norm.weight
        y, h = norm(x, residual)
    else:
        y, h = hidden_sharded_add_rms_norm(x, residual, weight, 1e-6, **options)
    torch.autograd.backward((y, h), (dy.to(y.dtype), dh))
    return [y.detach(), h.detach(), x.grad, residual.grad, weight.grad]


def the_bits_of_one_process_on_1_2_and_4_ranks():
    for ranks in (1, 2, 4):
        group = dist.new_group(list(range(ranks)))
        if dist.get_rank() >= ranks:
            continue
        shares = [[16] * ranks, list(range(5, 5 + ranks))]
        roundings = [{}, {"rounding": "before_scale"}, {"weight_offset": 1.0, "sum": "exact", "alpha": 0.5}]
        for sizes, options, pair, module in itertools.product(shares, roundings, PAIRS, (False, True)):
            given = tensors((3, 5, sum(sizes)), *pair)
            wanted = one_process(*given, **options)
            found = sharded(group, sizes, given, module, **options)
            same(found, [part(t, sizes, dist.get_rank(group)) for t in wanted])


def a_norm_without_a_residual_and_a_weight_that_is_frozen():
    x, _, weight, dy, _ = tensors((6, 32), torch.float32, torch.float32)
    x[0] *= 1e30
    x[1] *= 1e-30
    rank, sizes = dist.get_rank(), [8] * RANKS
    whole = x.clone().requires_grad_()
    mine = part(x, sizes, rank).requires_grad_()
    y = hidden_sharded_rms_norm(mine, part(weight, sizes, rank))
    same([y.detach()], [part(rms_norm(x, weight), sizes, rank)])
    y.backward(part(dy, sizes, rank))
    rms_norm(whole, weight).backward(dy)
    same([mine.grad], [part(whole.grad, sizes, rank)])
    same([hidden_sharded_rms_norm(part(x, sizes, rank))], [part(rms_norm(x), sizes, rank)])


CHECKS = ("the_bits_of_one_process_on_1_2_and_4_ranks", "a_norm_without_a_residual_and_a_weight_that_is_frozen")


def work(rank, store, results):
    """One of the processes: runs every check, and puts (check, None), or what went wrong, in `results`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    for name in CHECKS:
        try:
            globals()[name]()
        except Exception:
            results.put((name, f"rank {rank}: {traceback.format_exc()}"))
            raise
        results.put((name, None))
    dist.barrier()
    dist.destroy_process_group()
