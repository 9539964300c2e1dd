"""What eight processes check together; test_distributed.py starts them. Every rank runs every check."""

import datetime as dt
import itertools
import traceback
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from rmsnorm import RMSNorm, add_rms_norm, reference, rms_norm
from tests.bits import bits_equal

RANKS = 8
# Of input and weight.
PAIRS = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float16, torch.float16)]


def same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        a = a.full_tensor() if isinstance(a, DTensor) else a
        assert bits_equal(a, b), (a - b).abs().max()


def tensors(shape, dtype, weight_dtype):
    """x, residual, weight, and incoming gradients of y and h: the same on every rank."""
    g = torch.Generator().manual_seed(0)
    x, residual, dy, dh = (torch.randn(shape, generator=g).to(dtype) for _ in range(4))
    return x, residual, torch.randn(shape[-1], generator=g).to(weight_dtype), dy, dh


def run(x, residual, weight, dy, dh, **options):
    """y, h, dx, dresidual, dweight; the last not where the weight is frozen."""
    x, residual = x.detach().requires_grad_(), residual.detach().requires_grad_()
    y, h = add_rms_norm(x, residual, weight, **options)
    torch.autograd.backward((y, h), (dy.to(y.dtype), dh))
    found = [y.detach(), h.detach(), x.grad, residual.grad]
    return found if weight.grad is None else [*found, weight.grad]


def one_process(x, residual, weight, dy, dh, frozen=False, **options):
    return run(x, residual, weight.detach().requires_grad_(not frozen), dy, dh, **options)


def on_mesh(mesh, placements, weight_placements, x, residual, weight, dy, dh, frozen=False, **options):
    """The same, on DTensors; and how many collectives of which kind the call and its backward made."""
    x, residual, dy, dh = (distribute_tensor(t, mesh, placements) for t in (x, residual, dy, dh))
    weight = distribute_tensor(weight, mesh, weight_placements).requires_grad_(not frozen)
    with CommDebugMode() as traffic:
        found = run(x, residual, weight, dy, dh, **options)
    return found, {str(op).rsplit(".", 1)[-1].rstrip(">'"): n for op, n in traffic.get_comm_counts().items() if n}


def additions(rows):
    """How many a term of dweight goes through at most: those in its block, and those of blocks."""
    length = reference.rows_per_block(rows)
    return min(rows, length) + (rows + length - 1) // length


def dweight_bound(x, dy, dtype=torch.float32, ranks=RANKS):
    # One process and the ranks add the same float32 terms, rank by rank first. Each addition rounds, by 2^-24 of the
    # sum of magnitudes at most; powers of that are below a hundredth of it. Both results are rounded to `dtype` once.
    rows = x.numel() // x.shape[-1]
    terms = rms_norm(x.double()) * dy.double()
    roundings = additions(rows) + additions(-(-rows // ranks)) + ranks
    bound = 1.01 * roundings * 2.0**-24 * terms.abs().reshape(rows, -1).sum(0)
    if dtype == torch.float32:
        return bound
    # Half a unit in the last place each.
    return bound + torch.finfo(dtype).eps * (terms.reshape(rows, -1).sum(0).abs() + bound)


# ---------------------------------------------------------------- rows in pieces


def hidden_sharding_has_the_bits_of_one_process_on_1_2_4_and_8_ranks():
    for ranks in (1, 2, 4, 8):
        mesh = DeviceMesh("cpu", torch.arange(ranks))
        if mesh.get_coordinate() is None:
            continue
        cases = [((3, 5, 64), {"rounding": r}) for r in reference.ROUNDINGS]
        cases += [((4, 65), {}), ((4, 3), {"weight_offset": 1.0}), ((1000,), {})]
        for (shape, options), pair in itertools.product(cases, PAIRS):
            given = tensors(shape, *pair)
            found, traffic = on_mesh(mesh, [Shard(len(shape) - 1)], [Shard(0)], *given, **options)
            assert all(isinstance(t, DTensor) and t.placements[0].is_shard() for t in found)
            same(found, one_process(*given, **options))
            # One MAX and one SUM forward, and the same backward.
            assert traffic == {"all_reduce": 4}, traffic


def hidden_sharding_keeps_the_whole_range_and_lets_no_row_touch_another():
    mesh = init_device_mesh("cpu", (RANKS,))
    x, residual, weight, dy, dh = tensors((6, 64), torch.float32, torch.float32)
    residual = torch.zeros_like(residual)
    x[0] *= 1e30
    x[1] *= 1e-30
    x[2, 40] = torch.inf
    x[3, 63] = torch.nan
    x[4] = 0
    given = x, residual, weight, dy, dh
    found, _ = on_mesh(mesh, [Shard(1)], [Shard(0)], *given, frozen=True)
    same(found, one_process(*given, frozen=True))


def hidden_sharding_takes_a_replicated_weight_and_no_weight():
    mesh = init_device_mesh("cpu", (RANKS,))
    given = tensors((4, 64), torch.float32, torch.float32)
    found, _ = on_mesh(mesh, [Shard(1)], [Replicate()], *given)
    same(found, one_process(*given))
    x = distribute_tensor(given[0], mesh, [Shard(1)])
    same([rms_norm(x)], [rms_norm(given[0])])


def hidden_and_batch_sharding_on_a_mesh_of_two_dimensions():
    mesh = init_device_mesh("cpu", (2, 4))
    given = tensors((4, 3, 64), torch.bfloat16, torch.float32)
    found, _ = on_mesh(mesh, [Shard(0), Shard(2)], [Replicate(), Shard(0)], *given)
    *others, dweight = one_process(*given)
    same(found[:-1], others)
    x, residual, _, dy, _ = given
    assert ((found[-1].full_tensor() - dweight).abs() <= dweight_bound(x + residual, dy)).all()
    found, _ = on_mesh(mesh, [Shard(2), Shard(2)], [Shard(0), Shard(0)], *given)
    same(found, [*others, dweight])


# ---------------------------------------------------------------- whole rows on each rank


def replicated_inputs_have_the_bits_of_one_process():
    mesh = init_device_mesh("cpu", (RANKS,))
    for pair in PAIRS:
        given = tensors((3, 5, 64), *pair)
        found, traffic = on_mesh(mesh, [Replicate()], [Replicate()], *given)
        assert traffic == {}
        same(found, one_process(*given))


def batch_and_sequence_sharding_communicate_dweight_alone():
    mesh = init_device_mesh("cpu", (RANKS,))
    for shape, dim in (((8, 3, 64), 0), ((2, 16, 64), 1), ((2, 11, 64), 1)):
        given = tensors(shape, torch.float32, torch.float32)
        found, traffic = on_mesh(mesh, [Shard(dim)], [Replicate()], *given)
        assert traffic == {"all_reduce": 1}, traffic
        assert found[-1].placements == (Replicate(),)
        *others, dweight = one_process(*given)
        same(found[:-1], others)
        x, residual, _, dy, _ = given
        assert ((found[-1].full_tensor() - dweight).abs() <= dweight_bound(x + residual, dy)).all()
        found, traffic = on_mesh(mesh, [Shard(dim)], [Replicate()], *given, frozen=True)
        assert traffic == {}, traffic
        same(found, one_process(*given, frozen=True))


def dweight_of_a_16_bit_weight_is_rounded_once():
    mesh = init_device_mesh("cpu", (RANKS,))
    for dtype in (torch.bfloat16, torch.float16):
        given = tensors((16, 4, 64), dtype, dtype)
        found, traffic = on_mesh(mesh, [Shard(0)], [Replicate()], *given)
        assert traffic == {"all_reduce": 1}, traffic
        dweight, expected = found[-1].full_tensor(), one_process(*given)[-1]
        assert dweight.dtype == dtype
        x, residual, _, dy, _ = given
        assert ((dweight.double() - expected.double()).abs() <= dweight_bound(x + residual, dy, dtype)).all()


def fewer_rows_than_ranks():
    # DTensor gathers these: it lets no operator leave a rank with nothing.
    mesh = init_device_mesh("cpu", (RANKS,))
    given = tensors((3, 64), torch.float32, torch.float32)
    found, _ = on_mesh(mesh, [Shard(0)], [Replicate()], *given)
    same(found, one_process(*given))


def a_mesh_of_two_dimensions_with_a_frozen_weight_communicates_nothing():
    mesh = init_device_mesh("cpu", (2, 4))
    given = tensors((2, 8, 64), torch.bfloat16, torch.float32)
    found, traffic = on_mesh(mesh, [Shard(0), Shard(1)], [Replicate(), Replicate()], *given, frozen=True)
    assert traffic == {}, traffic
    same(found, one_process(*given, frozen=True))


def partial_sums_are_reduced_before_they_are_normalised():
    mesh = init_device_mesh("cpu", (RANKS,))
    x = torch.arange(24.0).view(3, 8)
    given = DTensor.from_local(x, mesh, [Partial()], run_check=False)
    same([rms_norm(given)], [rms_norm(x * RANKS)])


def several_normalised_dimensions():
    mesh = init_device_mesh("cpu", (RANKS,))
    x, weight = torch.randn(8, 3, 4), torch.randn(3, 4)
    dist.broadcast(x, 0)
    dist.broadcast(weight, 0)
    y = rms_norm(distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(weight, mesh, [Replicate()]))
    same([y], [rms_norm(x, weight)])


def tensors_and_dtensors_do_not_mix():
    mesh = init_device_mesh("cpu", (RANKS,))
    with pytest.raises(TypeError, match="weight must be a DTensor"):
        rms_norm(distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)]), torch.ones(8))


def compiled_code_has_the_same_bits():
    mesh = init_device_mesh("cpu", (RANKS,))
    x, _, weight, _, _ = tensors((8, 64), torch.float32, torch.float32)
    compiled = torch.compile(rms_norm, backend="aot_eager", fullgraph=True)
    given = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(weight, mesh, [Replicate()])
    same([compiled(*given)], [rms_norm(x, weight)])


# ---------------------------------------------------------------- wrappers


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = RMSNorm(64)
        self.linear = nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return self.norm(self.linear(self.norm(x)))


def seeded(make):
    torch.manual_seed(0)
    return make()


def sequence_parallel_modules():
    mesh = init_device_mesh("cpu", (RANKS,))
    x, _, _, dy, _ = tensors((2, 16, 64), torch.float32, torch.float32)
    norm = parallelize_module(RMSNorm(64), mesh, SequenceParallel())
    assert norm.weight.placements == (Replicate(),)
    y = norm(distribute_tensor(x, mesh, [Shard(1)]))
    assert y.placements == (Shard(1),)
    plain = RMSNorm(64)
    expected = plain(x)
    same([y], [expected])
    expected.backward(dy)
    y.backward(distribute_tensor(dy, mesh, [Shard(1)]))
    assert ((norm.weight.grad.full_tensor() - plain.weight.grad).abs() <= dweight_bound(x, dy)).all()


def fsdp2_has_the_bits_of_one_process():
    mesh = init_device_mesh("cpu", (RANKS,))
    plain, sharded = seeded(Net), seeded(Net)
    fully_shard(sharded, mesh=mesh)
    x, _, _, dy, _ = tensors((RANKS, 5, 64), torch.float32, torch.float32)
    mine = slice(dist.get_rank(), dist.get_rank() + 1)
    a, b = x[mine].clone().requires_grad_(), x[mine].clone().requires_grad_()
    expected, y = plain(a), sharded(b)
    same([y], [expected])
    expected.backward(dy[mine])
    y.backward(dy[mine])
    same([b.grad], [a.grad])
    # The gradient is the mean over the ranks: eight float32 numbers, in some order.
    mean = plain.norm.weight.grad.clone()
    size = plain.norm.weight.grad.abs()
    for t in (mean, size):
        dist.all_reduce(t)
    assert ((sharded.norm.weight.grad.full_tensor() - mean / RANKS).abs() <= 2 * RANKS * 2.0**-24 * size).all()


def fsdp2_mixed_precision_stays_on_the_kernels_without_a_warning():
    mesh = init_device_mesh("cpu", (RANKS,))
    model = seeded(Net)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model.linear, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    seen = []
    model.norm.register_forward_hook(
        lambda norm, x, y: seen.append((x[0].dtype, norm.weight.dtype, y.dtype, y.grad_fn))
    )
    x = torch.randn(2, 64).bfloat16().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x).float().sum().backward()
    for x_dtype, weight_dtype, y_dtype, grad_fn in seen:
        assert (x_dtype, weight_dtype, y_dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
        assert type(grad_fn).__name__ == "RMSNormBackward"
    assert model.norm.weight.grad.dtype == torch.float32


# ---------------------------------------------------------------- running them

CHECKS = {
    name: function
    for name, function in list(globals().items())
    if callable(function)
    and getattr(function, "__module__", None) == __name__
    and not isinstance(function, type)
    and name not in ("same", "tensors", "run", "one_process", "on_mesh", "additions", "dweight_bound", "seeded")
}


def work(rank, store, results):
    """One of the processes: runs every check, and puts (check, None), or what went wrong, in `results`."""
    torch.set_num_threads(1)
    # A rank that fails leaves the others waiting: not for long.
    patience = dt.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=patience)
    for name, check in CHECKS.items():
        try:
            check()
        except Exception:
            results.put((name, f"rank {rank}: {traceback.format_exc()}"))
            raise
        results.put((name, None))
    dist.barrier()
    dist.destroy_process_group()
