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
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from rmsnorm import RMSNorm, add_rms_norm, rms_norm
from rmsnorm.distributed import weight_gradient
from rmsnorm.numerics import decomposition, fixed_sum
from rmsnorm.spec import ROUNDINGS, NormSpec
from tests.distributed import modulation_checks, rotation_checks
from tests.support.bits import bits_equal
from tests.support.forms import FORMS, incoming_gradient

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


# ---------------------------------------------------------------- rows in pieces


def hidden_sharding_has_the_bits_of_one_process_on_1_2_4_and_8_ranks():
    for ranks in (1, 2, 4, 8):
        mesh = DeviceMesh("cpu", torch.arange(ranks))
        if mesh.get_coordinate() is None:
            continue
        cases = [((3, 5, 64), {"rounding": r}) for r in ROUNDINGS]
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
    expected = one_process(*given)
    for placements, weight_placements in (
        ([Shard(0), Shard(2)], [Replicate(), Shard(0)]),
        ([Shard(2), Shard(1)], [Shard(0), Replicate()]),
        ([Shard(2), Shard(2)], [Shard(0), Shard(0)]),
    ):
        found, _ = on_mesh(mesh, placements, weight_placements, *given)
        same(found, expected)


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
    # Equal shares of many rows, in one run a rank and in several; of few; shares that differ; runs that halve nothing.
    for shape, dim in (
        *(((8, 50, 64), 0), ((2, 8 * 40, 64), 1), ((4, 2, 8 * 40, 3), 2)),
        *(((8, 3, 64), 0), ((2, 16, 64), 1), ((2, 11, 64), 1), ((300, 64), 0), ((3, 8 * 40, 64), 1)),
    ):
        given = tensors(shape, torch.float32, torch.float32)
        found, traffic = on_mesh(mesh, [Shard(dim)], [Replicate()], *given)
        assert traffic == {"all_to_all_single": 1, "all_gather_into_tensor": 1}, traffic
        assert found[-1].placements == (Replicate(),)
        same(found, one_process(*given))
        found, traffic = on_mesh(mesh, [Shard(dim)], [Replicate()], *given, frozen=True)
        assert traffic == {}, traffic
        same(found, one_process(*given, frozen=True))


def only_sums_are_sent_of_equal_shares():
    mesh = init_device_mesh("cpu", (RANKS,))
    sum_over_ranks, sent = weight_gradient.sum_over_ranks, []

    def recorded(part, *others):
        sent.append(part.numel() // 64)
        return sum_over_ranks(part, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_gradient, "sum_over_ranks", recorded)
        for shape, dim in (((8, 50, 64), 0), ((2, 8 * 40, 64), 1), ((3, 8 * 40, 64), 1)):
            on_mesh(mesh, [Shard(dim)], [Replicate()], *tensors(shape, torch.float32, torch.float32))
    assert sent == [1, 2, 3 * 40]


def ranks_that_are_no_power_of_two():
    for ranks in (3, 6):
        mesh = DeviceMesh("cpu", torch.arange(ranks))
        if mesh.get_coordinate() is None:
            continue
        for shape, dim in (((ranks, 50, 64), 0), ((2, 40 * ranks, 65), 1)):
            given = tensors(shape, torch.float32, torch.float32)
            found, _ = on_mesh(mesh, [Shard(dim)], [Replicate()], *given)
            same(found, one_process(*given))


def rows_on_a_mesh_of_two_dimensions():
    mesh = init_device_mesh("cpu", (2, 4))
    for shape, *placements in (
        ((4, 4 * 40, 64), Shard(0), Shard(1)),
        ((4 * 40, 4, 64), Shard(1), Shard(0)),
        ((8 * 40, 64), Shard(0), Shard(0)),
        ((8 * 40 + 3, 64), Shard(0), Shard(0)),
        ((2, 4, 3, 64), Shard(0), Shard(1)),
        ((4, 4 * 40, 64), Shard(0), Replicate()),
    ):
        for pair in PAIRS:
            given = tensors(shape, *pair)
            found, _ = on_mesh(mesh, placements, [Replicate(), Replicate()], *given)
            same(found, one_process(*given))


def dweight_of_a_16_bit_weight_is_rounded_once():
    mesh = init_device_mesh("cpu", (RANKS,))
    for dtype in (torch.bfloat16, torch.float16):
        for shape in ((16, 4, 64), (8, 40, 64)):
            given = tensors(shape, dtype, dtype)
            found, _ = on_mesh(mesh, [Shard(0)], [Replicate()], *given)
            assert found[-1].dtype == dtype
            same(found, one_process(*given))


def gradients_that_can_be_differentiated_have_the_same_bits():
    mesh = init_device_mesh("cpu", (RANKS,))
    x, _, weight, dy, _ = tensors((8, 40, 64), torch.float32, torch.float32)

    def gradients(x, weight, dy):
        x, weight = x.requires_grad_(), weight.requires_grad_()
        return torch.autograd.grad(rms_norm(x, weight), (x, weight), dy, create_graph=True)

    cut = [distribute_tensor(t, mesh, [Shard(0)]) for t in (x, dy)]
    found = gradients(cut[0], distribute_tensor(weight, mesh, [Replicate()]), cut[1])
    same(found, gradients(x, weight, dy))


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
    compiled = torch.compile(rms_norm, backend="aot_eager", fullgraph=True)
    for rows in (8, 8 * 40):
        x, _, weight, dy, _ = tensors((rows, 64), torch.float32, torch.float32)
        given = [
            distribute_tensor(x, mesh, [Shard(0)]).requires_grad_(),
            distribute_tensor(weight, mesh, [Replicate()]).requires_grad_(),
        ]
        y = compiled(*given)
        found = torch.autograd.grad(y, given, distribute_tensor(dy, mesh, [Shard(0)]))
        leaves = x.requires_grad_(), weight.requires_grad_()
        expected = rms_norm(*leaves)
        same([y, *found], [expected, *torch.autograd.grad(expected, leaves, dy)])


def function_transforms_take_dtensors():
    mesh = init_device_mesh("cpu", (RANKS,))
    x, _, weight, _, _ = tensors((8, 3, 64), torch.float32, torch.float32)

    def transformed(norm, x, weight):
        dx, dweight = torch.func.grad(lambda x, weight: norm(x, weight).sum(), argnums=(0, 1))(x, weight)
        dx_alone = torch.func.grad(lambda x: norm(x, weight).sum())(x)
        return torch.func.vmap(lambda x: norm(x, weight))(x), dx, dx_alone, dweight

    given = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(weight, mesh, [Replicate()])
    *found, dweight = transformed(rms_norm, *given)
    assert all(t.placements == (Shard(0),) for t in found)
    # It is the formula: DTensor knows each of its operations.
    *wanted, expected = transformed(lambda x, weight: decomposition.forward(x, None, weight, NormSpec(1e-6)), x, weight)
    same(found, wanted)
    # Both are float32 sums of the same 24 terms, in two orders: each of 23 additions rounds by 2^-24 of all at most.
    magnitude = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).abs().sum((0, 1))
    assert ((dweight.full_tensor() - expected).abs() <= 2 * 23 * 1.01 * 2.0**-24 * magnitude).all()


# ---------------------------------------------------------------- wrappers


class AddInPairs:
    """Reduces as the tree of dweight does: neighbours, then neighbours among their sums (docs/distributed.md)."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        parts = torch.empty_like(input_tensor)  # what each rank has of this rank's share
        dist.all_to_all_single(parts, input_tensor, group=group)
        total = fixed_sum.add_in_pairs(parts.view(group.size(), -1))
        output_tensor.copy_(total / group.size() if op == dist.ReduceOp.AVG else total)


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
    same([norm.weight.grad], [plain.weight.grad])


def fsdp2_has_the_bits_of_one_process():
    mesh = init_device_mesh("cpu", (RANKS,))
    for dtype, weight_dtype in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32)):
        x, _, weight, dy, _ = tensors((RANKS, 40, 64), dtype, weight_dtype)
        plain, sharded = RMSNorm(64), RMSNorm(64)
        for norm in (plain, sharded):
            norm.load_state_dict({"weight": weight})
        fully_shard(sharded, mesh=mesh)
        sharded.set_custom_reduce_scatter(AddInPairs())
        a = x.clone().requires_grad_()
        expected = plain(a)
        expected.backward(dy)
        mine = slice(dist.get_rank(), dist.get_rank() + 1)
        b = x[mine].clone().requires_grad_()
        y = sharded(b)
        y.backward(dy[mine])
        same([y, b.grad], [expected[mine], a.grad[mine]])
        # FSDP takes the mean over the ranks: of a power of two of them, that rounds nothing.
        same([sharded.weight.grad], [plain.weight.grad / RANKS])


def fsdp2_of_two_ranks_has_the_bits_of_one_process_as_it_is():
    mesh = init_device_mesh("cpu", (RANKS // 2, 2), mesh_dim_names=("other", "fsdp"))["fsdp"]
    x, _, _, dy, _ = tensors((2, 40, 64), torch.float32, torch.float32)
    plain, sharded = RMSNorm(64), RMSNorm(64)
    fully_shard(sharded, mesh=mesh)
    plain(x).backward(dy)
    mine = slice(mesh.get_local_rank(), mesh.get_local_rank() + 1)
    sharded(x[mine]).backward(dy[mine])
    same([sharded.weight.grad], [plain.weight.grad / 2])


def fsdp2_with_sequence_parallelism_has_the_bits_of_one_process():
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"].get_local_rank(), mesh["tp"]
    x, _, _, dy, _ = tensors((4, 4 * 40, 64), torch.float32, torch.float32)
    plain, sharded = RMSNorm(64), RMSNorm(64)
    parallelize_module(sharded, tp, SequenceParallel())
    fully_shard(sharded, mesh=mesh["dp"])
    a = x.clone().requires_grad_()
    expected = plain(a)
    expected.backward(dy)
    mine = slice(2 * dp, 2 * dp + 2)
    b = distribute_tensor(x[mine], tp, [Shard(1)]).requires_grad_()
    y = sharded(b)
    y.backward(distribute_tensor(dy[mine], tp, [Shard(1)]))
    same([y, b.grad, sharded.weight.grad], [expected[mine], a.grad[mine], plain.weight.grad / 2])


def fsdp2_of_other_modules_too_has_the_gradient_of_its_rows_and_their_mean():
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
    # The mean of eight float32 numbers, in some order.
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
        assert type(grad_fn).__name__ == "NormBackward"
    assert model.norm.weight.grad.dtype == torch.float32


# ---------------------------------------------------------------- every form


def placed(tensors, mesh, placements):
    """DTensors: what has rows as given, the weight cut where its columns are."""
    last = tensors[0].dim() - 1
    columns = [Shard(0) if p.is_shard(last) else Replicate() for p in placements]
    return [None if t is None else distribute_tensor(t, mesh, columns if t.dim() == 1 else placements) for t in tensors]


def distributed_gradients(form, tensors):
    """As `Form.gradients`, of DTensors."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    results = form(*leaves)
    incoming = [
        distribute_tensor(incoming_gradient(r.full_tensor().detach()), r.device_mesh, r.placements) for r in results
    ]
    found = torch.autograd.grad(results, [t for t in leaves if t is not None], incoming)
    return [*(r.detach() for r in results), *found]


def every_form_has_the_bits_of_one_process():
    mesh = init_device_mesh("cpu", (RANKS,))
    for form, dtype in itertools.product(FORMS, (torch.float32, torch.bfloat16)):
        given = form.tensors((8, 16, 96), dtype)
        given[0][0] *= 1e30
        expected = form.gradients(given)
        # Groups of 6, 8, 12 and of 4: on 8 ranks 12 columns each, of which some are whole groups and some are not.
        for placement in (Replicate(), Shard(0), Shard(1), Shard(2)):
            same(distributed_gradients(form, placed(given, mesh, [placement])), expected)


def every_form_on_a_mesh_of_two_dimensions():
    mesh = init_device_mesh("cpu", (2, RANKS // 2))
    for form in FORMS[::3]:
        given = form.tensors((4, 8, 96), torch.bfloat16)
        expected = form.gradients(given)
        for placements in ([Shard(0), Shard(2)], [Shard(2), Shard(1)], [Shard(2), Shard(2)]):
            same(distributed_gradients(form, placed(given, mesh, placements)), expected)


def second_derivatives_of_trained_weights():
    mesh = init_device_mesh("cpu", (RANKS,))
    for form in FORMS[::3]:
        given = form.tensors((8, 4, 24))

        def second(tensors, form=form):
            leaves = [t.detach().clone().requires_grad_() for t in tensors if t is not None]
            x, *beside, weight = leaves
            y = form(x, beside[0] if beside else None, weight)[0]
            first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
            return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

        expected = second(given)
        for placement in (Replicate(), Shard(0), Shard(1)):
            for a, b in zip(second(placed(given, mesh, [placement])), expected, strict=True):
                # Both are float32 sums of at most 800 terms (rows, columns), each of some 30 roundings; the largest
                # term is below the largest result of its tensor times 24, for a row's columns.
                bound = 24 * (800 + 30) * 2.0**-24 * b.abs().amax()
                assert (a.full_tensor() - b).abs().amax() <= bound, (str(form), placement)


def plain_weights_under_implicit_replication():
    mesh = init_device_mesh("cpu", (RANKS,))
    for form in FORMS[::3]:
        given = form.tensors((8, 4, 24))
        *rows, weight = given
        weight = weight.clone().requires_grad_()
        with implicit_replication():
            *cut, _ = placed(given, mesh, [Shard(0)])
            results = form(*cut, weight)
            results[0].backward(distribute_tensor(incoming_gradient(rows[0]).to(results[0].dtype), mesh, [Shard(0)]))
        leaf = given[2].clone().requires_grad_()
        expected = form(*rows, leaf)
        expected[0].backward(incoming_gradient(rows[0]).to(expected[0].dtype))
        same(list(results), list(expected))
        same([weight.grad], [leaf.grad])


def modulation_has_the_bits_of_one_process():
    modulation_checks.modulation_has_the_bits_of_one_process(RANKS)


def rotation_has_the_bits_of_one_process():
    rotation_checks.rotation_has_the_bits_of_one_process(RANKS)


# ---------------------------------------------------------------- running them

CHECKS = {
    name: function
    for name, function in list(globals().items())
    if callable(function)
    and getattr(function, "__module__", None) == __name__
    and not isinstance(function, type)
    and name not in ("same", "tensors", "run", "one_process", "on_mesh", "seeded", "placed", "distributed_gradients")
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
