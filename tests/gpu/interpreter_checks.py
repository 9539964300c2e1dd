"""What calls of the operators alone do not show, under the interpreter. Each check yields a text for each fault."""

import mmap
import sys
import warnings
from itertools import product

import torch

import rmsnorm
from rmsnorm.gpu import call_cache, configurations, operators, registration
from rmsnorm.ops import library
from tests.gpu.cases import BRAIN, DTYPES, SINGLE, plain_weight
from tests.support.bits import unequal
from tests.support.rows import all_rows, random_rows

ops = torch.ops.rmsnorm
MAP_NORESERVE = 0x4000  # Linux; the mmap module has it from Python 3.13 on


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
                y = operators.gated_forward(x, gate, weight, 1e-6, 0.0, 0, *options)
                yield from unequal(
                    f"far gate {width}", y, ops.gated_forward(near, near, weight, 1e-6, 0.0, 0, *options)
                )
                rest = rstd, weight, None, 0.0, *options, True, True, True
                found = operators.gated_backward(x, gate, x, *rest)
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
            for f, e in zip(operators.gated_forward_train(x, x, weight, 1e-6, 0.0, 0, *options), expected, strict=True):
                yield from unequal(f"gated beyond reach {shape}", f, e)
            rest = expected[1], weight, None, 0.0, *options, True, True, True
            for f, e in zip(operators.gated_backward(x, x, x, *rest), ops.gated_backward(x, x, x, *rest), strict=True):
                yield from unequal(f"gated backward beyond reach {shape}", f, e)
    configurations.MOST_COLS, configurations.MOST_ROWS = limits


def public_functions():
    """Everything above the operators finds them by the device alone; here they are those of the CPU."""
    expected = list(_everything())
    registrations = torch.library.Library("rmsnorm", "IMPL")
    with warnings.catch_warnings(action="ignore"):  # that there is one already
        registration.register(registrations, "CPU", allow_override=True)
    holders = [m for name, m in sys.modules.items() if name.startswith("rmsnorm")]
    holders += {v for m in holders for v in vars(m).values() if isinstance(v, library.Operators)}
    dispatched = [
        (vars(holder), name, value)
        for holder in holders
        for name, value in vars(holder).items()
        if any(value is o.direct for o in holders if isinstance(o, library.Operators))
    ]
    # By the dispatcher, then by the call cache: where nothing is stored yet, and where it is.
    for fast in (False, True, True):
        for variables, name, value in dispatched:
            variables[name] = call_cache.fast(value) if fast else value
        for (what, f), (_, e) in zip(_everything(), expected, strict=True):
            yield from unequal(what, f, e)
    for variables, name, value in dispatched:
        variables[name] = value
    if not len(dispatched) >= 2:
        yield f"only {len(dispatched)} places hold the operators"
    registrations._destroy()


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
        groups = *given, x.shape[-1] // (2 - x.shape[-1] % 2), i % 2, i % 3 == 1
        gate = (None, x.flip(0))[j % 2]
        found = operators.gated_forward(x, gate, *groups)
        yield from unequal(f"gated: {call}", found, ops.gated_forward(x, gate, *groups))
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
    if not 100 < call_cache.size() < len(calls) * 2.5:
        yield f"{call_cache.size()} prepared calls"


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
