"""Where the operators write, and what they refuse, under the interpreter. Each check yields a text for each fault."""

import torch

from rmsnorm.gpu import call_cache, operators
from tests.gpu.cases import BRAIN, SINGLE, plain_weight
from tests.support.bits import unequal
from tests.support.rows import random_rows

ops = torch.ops.rmsnorm


class Into:
    """A call that writes into memory of the caller's, and what it must write."""

    def __init__(self, x, gate, weight, options):
        self.arguments = gate, weight, 1e-6, 0.0, 0, *options
        self.y = ops.gated_forward(x, *self.arguments) if options else ops.forward(x, weight, 1e-6)
        self.plain = not options

    def __call__(self, x, out):
        if self.plain:
            operators.forward_out(x, self.arguments[1], 1e-6, out)
        else:
            operators.gated_forward_out(x, *self.arguments, out)


def out():
    """In place, and into rows with gaps, in one tile and in pieces, twice: nothing around a row is written.

    What is stored of a call is not used where `out` lies over x in part.
    """
    for width, group, dtype in ((130, 65, BRAIN), (1000, 250, SINGLE), (16_400, 8200, BRAIN)):
        x, gate = random_rows(3, width, dtype, 1), random_rows(3, width, dtype, 2)
        weight = plain_weight(width, dtype)
        forms = (None, ()), (gate, (group, 0, False)), (gate, (group, 1, True)), (None, (group, 0, False))
        for number, call in enumerate(Into(x, z, weight, options) for z, options in forms):
            name = f"{width}, form {number}"
            around = torch.full((3 * (width + 3) + 1,), 7.0, dtype=dtype)
            rows = around[1:].unflatten(0, (3, width + 3))[:, :width]
            for _ in range(2):
                call(x, rows)
                yield from unequal(f"out {name}", rows.clone(), call.y)
                rows.fill_(7.0)
                yield from unequal(f"around out {name}", around, torch.full_like(around, 7.0))
                in_place = x.clone()
                call(in_place, in_place)
                yield from unequal(f"out=x {name}", in_place, call.y)
            memory = torch.zeros(6 * width, dtype=dtype)
            source = memory[: 3 * width].view(3, width)
            call(source, torch.empty_like(source))
            for shift, refused in ((8, True), (width, True), (3 * width, False)):
                target = memory[shift:][: 3 * width].view(3, width)
                if ("overlaps" in message(call, source, target)) != refused:
                    yield f"out {name}, {shift} elements after x: {message(call, source, target)!r}"


def message(function, *arguments):
    """What a call is refused with."""
    try:
        function(*arguments)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def freed():
    """A tensor whose storage was freed is an error, by its name, of every operator, also where the call is stored."""
    size = 1e-6, 0.0, 0, 8
    calls = {
        "forward": (("x", "weight"), (1e-6,)),
        "forward_train": (("x", "weight"), (1e-6,)),
        "add_forward": (("x", "residual", "weight"), (1e-6,)),
        "residual_forward": (("x", "residual", "weight"), (*size, True, 2.0)),
        "gated_forward": (("x", "gate", "weight"), (*size, 0, True)),
        "gated_forward_train": (("x", "gate", "weight"), (*size, 0, False)),
        "gated_forward_out": (("x", "gate", "weight"), (*size, 0, False, torch.empty(2, 16))),
        "backward": (("dy", "x", "rstd", "weight"), (0.0, None, None, True, True)),
        "gated_backward": (
            ("dy", "x", "gate", "rstd", "weight"), (None, 0.0, 8, 0, False, True, True, True)
        ),
    }  # fmt: skip
    for name, (tensors, rest) in calls.items():
        shapes = {"weight": (16,), "rstd": (2, 2 if name == "gated_backward" else 1)}
        call_cache.clear()
        for lost in (None, None, *tensors):
            given = [torch.ones(shapes.get(tensor, (2, 16))) for tensor in tensors]
            if lost is not None:
                given[tensors.index(lost)].untyped_storage().resize_(0)
            found = message(getattr(operators, name), *given, *rest)
            if found != ("" if lost is None else f"{lost} has no memory: its storage was freed"):
                yield f"{name} without {lost}: {found!r}"


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
    summed = [(x, torch.ones(2, 3)), (x, x.double()), (x, x.to("meta"))]
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
        (x.double(), weight, 0, 4, 0),
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
        *((operators.gated_forward, (x, g, w, 1e-6, 0.0, *rest, True)) for g, w, *rest in gated),
        *(
            (operators.gated_backward, (dy, x, gate, r, weight, None, 0.0, size, 0, not first, True, need, True))
            for dy, gate, r, size, first, need in gated_backward
        ),
        (operators.gated_forward, (x, x, weight, float("nan"), 0.0, 0, 4, 0, True)),
        *((operators.forward, a) for a in forward),
        *((operators.add_forward, (*a, None, 1e-6)) for a in add),
        *((operators.residual_forward, (*a, None, 1e-6, 0.0, 0, 2, True, 1.0)) for a in summed),
        (operators.residual_forward, (x, x, None, 1e-6, 0.0, 0, 3, True, 1.0)),
        (operators.residual_forward, (x, x, None, 1e-6, 0.0, 0, 2, True, float("inf"))),
        (operators.gated_backward, (x, x, x, rstd, weight, x, 0.0, 4, 0, False, True, True, True)),
        *((operators.forward_out, (x, None, 1e-6, a)) for a in into),
        *((operators.gated_forward_out, (x, None, None, 1e-6, 0.0, 0, 2, 0, False, a)) for a in into),
        *((operators.backward, (*a[:4], 0.0, *a[4:], True, True)) for a in backward),
    ]
    for function, arguments in calls:
        try:
            function(*arguments)
        except (RuntimeError, ValueError):
            continue
        yield f"not refused: {function.__name__}{arguments}"
