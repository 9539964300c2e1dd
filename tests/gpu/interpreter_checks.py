"""What calls of the operators alone do not show, under the interpreter. Each check yields a text for each fault."""

import mmap
import warnings
from itertools import product

import torch

import rmsnorm
from rmsnorm import functional, gpu
from rmsnorm.gpu import call_cache, configurations, gated_operators, operators
from tests.gpu.cases import BRAIN, DTYPES, SINGLE, plain_weight
from tests.support.bits import difference
from tests.support.rows import all_rows, random_rows

ops = torch.ops.rmsnorm
MAP_NORESERVE = 0x4000  # Linux; the mmap module has it from Python 3.13 on


def unequal(what, found, expected):
    if (wrong := difference(found, expected)) is not None:
        yield f"{what}: {wrong}"


def out():
    """In place, and into rows with gaps: in one tile and in pieces. Nothing around a row is written."""
    for width, dtype in ((130, BRAIN), (1000, SINGLE), (32_769, BRAIN)):
        x, weight = random_rows(3, width, dtype, 1), plain_weight(width, dtype)
        y = ops.forward(x, weight, 1e-6, 0.0, 0)
        around = torch.full((3 * (width + 3) + 1,), 7.0, dtype=dtype)
        rows = around[1:].unflatten(0, (3, width + 3))[:, :width]
        operators.forward_out(x, weight, 1e-6, rows)
        yield from unequal(f"out {width}", rows.clone(), y)
        rows.fill_(7.0)
        yield from unequal(f"around out {width}", around, torch.full_like(around, 7.0))
        operators.forward_out(x, weight, 1e-6, x)
        yield from unequal(f"out=x {width}", x, y)


def far_rows():
    """Offsets are 64-bit. The memory between the rows is reserved and never touched."""
    stride, rows = 2**31 + 32, 3
    for width, dtype in ((130, BRAIN), (9000, SINGLE)):
        room = ((rows - 1) * stride + width) * dtype.itemsize
        memory = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        far = torch.frombuffer(memory, dtype=dtype).as_strided((rows, width), (stride, 1))
        near, weight = random_rows(rows, width, dtype, 1), plain_weight(width, dtype)
        far.copy_(near)
        rstd = ops.forward_train(near, weight, 1e-6, 0.0, 0)[1]
        expected = ops.backward(near, near, rstd, weight, 0.0, None, None, True, True)
        for dy, x in ((near, far), (far, near)):
            found = operators.backward(dy, x, rstd, weight, 0.0, None, None, True, True)
            for f, e in zip(found, expected, strict=True):
                yield from unequal(f"backward of far rows {width}", f, e)
        for form in ((0, True), (1, False)):
            options = width // 2, *form
            rstd = ops.gated_forward_train(near, near, weight, 1e-6, 0.0, 0, *options)[1]
            for x, gate in ((near, far), (far, near)):
                y = gated_operators.gated_forward(x, gate, weight, 1e-6, 0.0, 0, *options)
                yield from unequal(
                    f"far gate {width}", y, ops.gated_forward(near, near, weight, 1e-6, 0.0, 0, *options)
                )
                rest = rstd, weight, None, 0.0, *options, True, True, True
                found = gated_operators.gated_backward(x, gate, x, *rest)
                for f, e in zip(found, ops.gated_backward(near, near, near, *rest), strict=True):
                    yield from unequal(f"gated backward of far rows {width}", f, e)
        operators.forward_out(far, weight, 1e-6, far)
        yield from unequal(f"far rows {width}", far.clone(), ops.forward(near, weight, 1e-6))


def permutations():
    """The sharpest test of the contract: permuted elements permute the result, and change no bit."""
    for width, dtype in ((130, BRAIN), (4096, SINGLE)):
        x, weight = all_rows(width, dtype), plain_weight(width, dtype)
        order = torch.randperm(width, generator=torch.Generator().manual_seed(1))
        y, rstd = operators.forward_train(x, weight, 1e-6)
        permuted, rstd_permuted = operators.forward_train(x[:, order], weight[order], 1e-6)
        yield from unequal(f"permuted y {width}", permuted, y[:, order])
        yield from unequal(f"permuted rstd {width}", rstd_permuted, rstd)


def beyond_reach():
    """What grids cannot count is computed by the reference."""
    limits = configurations.MOST_COLS, configurations.MOST_ROWS
    configurations.MOST_COLS, configurations.MOST_ROWS = 100, 8
    for shape in ((3, 130), (9, 50), (2, 100)):
        for dtype in DTYPES:
            x, weight = random_rows(*shape, dtype, 1), plain_weight(shape[1], dtype)
            expected = ops.add_forward(x, x, weight, 1e-6)
            for f, e in zip(operators.add_forward(x, x, weight, 1e-6), expected, strict=True):
                yield from unequal(f"beyond reach {shape}", f, e)
            into = torch.empty_like(x)
            operators.forward_out(x, weight, 1e-6, into)
            yield from unequal(f"out beyond reach {shape}", into, ops.forward(x, weight, 1e-6))
            rest = expected[2], weight, 0.0, None, None, True, True
            for f, e in zip(operators.backward(x, x, *rest), ops.backward(x, x, *rest), strict=True):
                yield from unequal(f"backward beyond reach {shape}", f, e)
            options = shape[1] // 10, 0, False  # ten groups of a row count as rows
            expected = ops.gated_forward_train(x, x, weight, 1e-6, 0.0, 0, *options)
            for f, e in zip(
                gated_operators.gated_forward_train(x, x, weight, 1e-6, 0.0, 0, *options), expected, strict=True
            ):
                yield from unequal(f"gated beyond reach {shape}", f, e)
            rest = expected[1], weight, None, 0.0, *options, True, True, True
            for f, e in zip(
                gated_operators.gated_backward(x, x, x, *rest), ops.gated_backward(x, x, x, *rest), strict=True
            ):
                yield from unequal(f"gated backward beyond reach {shape}", f, e)
    configurations.MOST_COLS, configurations.MOST_ROWS = limits


def refusals():
    """What would read or write elsewhere."""
    x, rstd, weight = torch.ones(2, 4), torch.ones(2, 1), torch.ones(4)
    forward = [
        (x, torch.ones(3), 1e-6, 0.0, 0),
        (x, torch.ones(2, 4), 1e-6, 0.0, 0),
        (x, torch.ones(1), 1e-6, 0.0, 0),
        (torch.ones(2, 0), None, 1e-6, 0.0, 0),
        (torch.ones(()), None, 1e-6, 0.0, 0),
        (x, None, 1e-6, 0.0, 3),
        (x, None, 1e-6, 0.0, -1),
        (x, None, float("nan"), 0.0, 0),
        (x, None, 1e-6, float("inf"), 0),
        (x.int(), None, 1e-6, 0.0, 0),
        (x.double(), None, 1e-6, 0.0, 0),
        (x, weight.double(), 1e-6, 0.0, 0),
        (x, weight.to("meta"), 1e-6, 0.0, 0),
    ]
    add = [(x, torch.ones(2, 3)), (x, torch.ones(4)), (x, x.bfloat16()), (x, x.to("meta"))]
    into = [torch.ones(2, 5), torch.ones(8), x.bfloat16(), torch.ones(2, 8)[:, ::2], torch.ones(4).expand(2, 4)]
    backward = [
        (torch.ones(2, 3), x, rstd, weight, None, None),
        (torch.ones(3, 4), x, rstd, weight, None, None),
        (x.double(), x, rstd, weight, None, None),
        (x, x, torch.ones(3, 1), weight, None, None),
        (x, x, rstd.double(), weight, None, None),
        (x, x, rstd, torch.ones(5), None, None),
        (x, x, rstd, weight, torch.ones(2, 3), None),
        (x, x, rstd, weight, x.bfloat16(), None),
        (x, x, rstd, weight, None, torch.float64),
        (x, x, rstd, weight, None, torch.int32),
    ]
    gated = [  # gate, weight, rounding, group_size, activation
        (torch.ones(2, 3), weight, 0, 4, 0),
        (torch.ones(1, 4), weight, 0, 4, 0),
        (x.bfloat16(), weight, 0, 4, 0),
        (x.to("meta"), weight, 0, 4, 0),
        (x, torch.ones(2), 0, 2, 0),
        (x, weight, 3, 4, 0),
        (x, weight, 0, 3, 0),
        (x, weight, 0, -4, 0),
        (x, weight, 0, 8, 0),
        (x, weight, 0, 4, 2),
        (x, weight, 0, 4, -1),
    ]
    gated_backward = [  # dy, gate, rstd, group_size, whether the gate is last, need_dgate
        (torch.ones(2, 3), x, rstd, 4, True, True),
        (x.bfloat16(), x, rstd, 4, True, True),
        (x.double(), x, rstd, 4, False, True),
        (x, x, rstd, 2, True, True),
        (x, x, rstd.double(), 4, True, True),
        (x, torch.ones(4), rstd, 4, True, True),
        (x, None, rstd, 4, True, True),
    ]
    calls = [
        *((gated_operators.gated_forward, (x, g, w, 1e-6, 0.0, *rest, True)) for g, w, *rest in gated),
        *(
            (gated_operators.gated_backward, (dy, x, gate, r, weight, None, 0.0, size, 0, not first, True, need, True))
            for dy, gate, r, size, first, need in gated_backward
        ),
        (gated_operators.gated_forward, (x, x, weight, float("nan"), 0.0, 0, 4, 0, True)),
        *((operators.forward, a) for a in forward),
        *((operators.add_forward, (*a, None, 1e-6)) for a in add),
        *((operators.forward_out, (x, None, 1e-6, a)) for a in into),
        *((operators.backward, (*a[:4], 0.0, *a[4:], True, True)) for a in backward),
    ]
    for function, arguments in calls:
        try:
            function(*arguments)
        except (RuntimeError, ValueError):
            continue
        yield f"not refused: {function.__name__}{arguments}"


def public_functions():
    """Everything above the operators finds them by the device alone; here they are those of the CPU."""
    expected = list(_everything())
    library = torch.library.Library("rmsnorm", "IMPL")
    with warnings.catch_warnings(action="ignore"):  # that there is one already
        for module in gpu.OPERATORS:
            gpu.register(library, module, "CPU", allow_override=True)
    direct = library.operators.direct
    for operators_of_cpu in (direct, call_cache.replaying(direct), call_cache.replaying(direct)):
        library.operators.direct = functional._direct = operators_of_cpu
        for (what, f), (_, e) in zip(_everything(), expected, strict=True):
            yield from unequal(what, f, e)
    library.operators.direct = functional._direct = direct
    library._destroy()


def repeated():
    """Calls like earlier ones, and calls that differ in one thing: each has its own result, with plans and without."""
    wide = random_rows(70, 160, SINGLE, 1)
    weight = plain_weight(136, SINGLE)
    tensors = {
        "rows": wide[:5, :130].contiguous(),
        "other values": wide[5:10, :130].contiguous(),
        "fewer rows": wide[:3, :130].contiguous(),
        "rows with gaps": wide[:5, :130],
        "rows off by a float": wide[:5, 1:131],
        "three dimensions": wide[:6, :130].contiguous().view(2, 3, 130),
        "transposed": wide[:6, :130].contiguous().view(2, 3, 130).transpose(0, 1),
        "a vector": wide[0, :130].contiguous(),
        "16 bits": wide[:5, :130].to(BRAIN),
        "fewer columns": wide[:5, :129].contiguous(),
        "more than a leaf": wide[:70, :130].contiguous(),
    }
    options = {
        "": (1e-6, 0.0, 0),
        "eps": (1e-3, 0.0, 0),
        "offset": (1e-6, 1.0, 0),
        "another offset": (1e-6, 0.5, 0),
        "rounding": (1e-6, 0.0, 1),
    }
    weights = (weight[:130].clone(), weight[1:131], weight[:130].to(BRAIN), None)
    calls = list(product(enumerate(tensors.items()), options.items(), enumerate(weights)))
    call_cache.clear()
    for (i, (what, x)), (other, (eps, offset, rounding)), (j, w) in calls + calls:
        call = f"{what}, {other}, weight {None if w is None else w.dtype}"
        w = None if w is None else w[: x.shape[-1]]
        given = w, eps, offset, rounding
        yield from unequal(call, operators.forward(x, *given), ops.forward(x, *given))
        if (i + j) % 4:
            continue
        expected = ops.add_forward(x, x.flip(0), *given)
        for f, e in zip(operators.add_forward(x, x.flip(0), *given), expected, strict=True):
            yield from unequal(f"add: {call}", f, e)
            if f.stride() != e.stride():
                yield f"add: {call}: strides {f.stride()}, expected {e.stride()}"
        if "offset" in other or not other:
            needed = ((True, True), (True, False), (False, True))[i % 3]
            rest = x, ops.forward_train(x, *given)[1], w, offset, x if i % 2 else None, None, *needed
            for f, e in zip(operators.backward(x.flip(0), *rest), ops.backward(x.flip(0), *rest), strict=True):
                yield from unequal(f"backward: {call}", f, e)
    if not 100 < len(call_cache._plans) < len(calls) * 1.5:
        yield f"{len(call_cache._plans)} plans"


def _everything():
    for dtype in (SINGLE, BRAIN):
        x, residual, dy = (random_rows(6, 130, dtype, seed).view(2, 3, 130) for seed in (1, 2, 3))
        weight = plain_weight(130, dtype)
        yield "rms_norm", rmsnorm.rms_norm(x, weight)
        yield "groups", rmsnorm.rms_norm(x, weight, group_size=65, rounding="before_scale")
        x, residual, weight = (t.clone().requires_grad_() for t in (x, residual, weight))
        for memory_efficient in (False, True):
            norm = rmsnorm.RMSNorm(130, dtype=dtype, memory_efficient=memory_efficient)
            norm.weight = torch.nn.Parameter(weight.detach())
            norm(x).backward(dy)
            yield "dx", x.grad
            yield "dweight", norm.weight.grad
            x.grad = None
        y, h = rmsnorm.add_rms_norm(x, residual, weight, weight_offset=1.0)
        found = torch.autograd.grad((y, h), (x, residual, weight), (dy, y))
        yield from zip(("dx", "dresidual", "dweight"), found, strict=True)
        traced = torch.compile(lambda a, b: rmsnorm.rms_norm(a, b).sin(), backend="aot_eager", fullgraph=True)
        found = torch.autograd.grad(traced(x, weight), (x, weight), dy)
        yield from zip(("dx compiled", "dweight compiled"), found, strict=True)
        torch._dynamo.reset()
        for options in ({}, {"activation": "sigmoid", "norm_before_gate": False, "group_size": 65}):
            y = rmsnorm.gated_rms_norm(x, residual, weight, **options)
            yield "gated", y
            found = torch.autograd.grad(y, (x, residual, weight), dy)
            yield from zip(("dx gated", "dgate", "dweight gated"), found, strict=True)
        y = rmsnorm.rms_norm(x, weight, group_size=26)
        yield from zip(("dx grouped", "dweight grouped"), torch.autograd.grad(y, (x, weight), dy), strict=True)
