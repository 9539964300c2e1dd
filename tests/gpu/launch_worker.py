"""What happens between an operator and the driver, where there is no driver: compilations and launches are recorded.

    python -m tests.gpu.launch_worker

prints {check: [fault, ...]} as JSON. `Device` stands for the parts of torch.cuda that a launch uses.
"""

import contextlib
import json
import random
from itertools import product
from types import SimpleNamespace

import torch
import triton
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget

from rmsnorm.gpu import availability, call_cache, calls, configurations, launching, layout, operators, registration
from rmsnorm.numerics import fixed_sum
from rmsnorm.ops import fallback

BRAIN, SINGLE = torch.bfloat16, torch.float32


class Recorder:
    """Compiles nothing, launches nothing, and remembers what it was asked for."""

    def __init__(self):
        self.compiled, self.launched, self.mistaken, self.current, self.stream = [], [], [], 0, 7
        self.streams = []

    def compile_for(self, target, kernel, arguments, aligned, warps):
        source = kernel.source(arguments, aligned)
        self.compiled.append((kernel.name, target, source, warps))

        recorder = self

        class Compiled:
            def __getitem__(self, grid):
                def run(*given, stream):
                    again = kernel.source(given, aligned)
                    if (again.signature, again.constants, again.attrs) != (
                        source.signature,
                        source.constants,
                        source.attrs,
                    ):
                        recorder.mistaken.append(f"{kernel.name}: compiled {source.constants}, given {again.constants}")
                    recorder.launched.append((recorder.current, kernel, grid, given, source))
                    recorder.streams.append(stream)

                return run

        return Compiled()

    @contextlib.contextmanager
    def device(self, device):
        before, self.current = self.current, device or 0
        yield
        self.current = before


@contextlib.contextmanager
def recording(target=("cuda", 90, 32)):
    recorder = Recorder()
    before = launching.compile_for, launching.torch, launching._current_device, launching._current_stream
    launching.compile_for = recorder.compile_for
    launching.torch = SimpleNamespace(cuda=SimpleNamespace(device=recorder.device))
    # Tensors on the CPU have no device index: None is the current device here.
    launching._current_device = lambda: recorder.current or None
    launching._current_stream = lambda device: recorder.stream
    launching._targets.clear()
    launching._compiled.clear()
    call_cache.clear()
    launching._targets[None] = GPUTarget(*target)
    launching._targets[1] = GPUTarget("cuda", 120, 32)
    try:
        yield recorder
    finally:
        launching.compile_for, launching.torch, launching._current_device, launching._current_stream = before
        launching._compiled.clear()
        call_cache.clear()


def x_of(rows, cols, dtype=BRAIN, offset=0):
    """Rows that begin `offset` elements past an aligned address."""
    memory = torch.empty(rows * cols + 64, dtype=dtype)
    aligned = -(memory.data_ptr() // dtype.itemsize) % 64
    return (
        memory[aligned + offset :][: rows * cols].view(rows, cols)
        if aligned + offset + rows * cols <= len(memory)
        else x_of(rows, cols, dtype, offset)
    )


def one_compilation_for_each_kind_of_call():
    """The number of rows, eps and values compile nothing; types, width, alignment, layout and options do."""
    with recording() as r:
        x, w = x_of(64, 4096), x_of(1, 4096)[0]
        calls = [
            lambda: operators.forward(x, w, 1e-6),
            lambda: operators.forward_train(x, w, 1e-6),
            lambda: operators.forward(x, None, 1e-6),
            lambda: operators.forward(x, w.float(), 1e-6),
            lambda: operators.forward(x.float(), w, 1e-6),
            lambda: operators.forward(x, w, 1e-6, 1.0),
            lambda: operators.forward(x, w, 1e-6, 0.0, 1),
            lambda: operators.add_forward(x, x, w, 1e-6),
            lambda: operators.forward(x[:, :2048], w[:2048], 1e-6),
            lambda: operators.forward(x_of(64, 4096, offset=1), w, 1e-6),
            lambda: operators.forward(x, x_of(1, 4096, offset=3)[0], 1e-6),
            lambda: operators.forward(x.view(8, 8, 4096).transpose(0, 1)[:5], w, 1e-6),
        ]
        for number, call in enumerate(calls, 1):
            call()
            # The two misaligned ones are one: nothing is assumed of either pointer.
            if len(r.compiled) != number - (number > 10):
                yield f"call {number}: {len(r.compiled)} compilations"
        for again in (
            *calls,
            lambda: operators.forward(x[:1], w, 1e-6),
            lambda: operators.forward(x[:63], w, 1e-5),
            lambda: operators.forward(torch.randn(7, 4096).to(BRAIN), w, 1e-6),
        ):
            before = len(r.launched)
            again()
            if len(r.compiled) != len(calls) - 1 or len(r.launched) == before:
                yield f"{len(r.compiled)} compilations after a second round"


def keys():
    """What the dictionary gives for a call is what would have been compiled for it."""
    random.seed(1)
    launches = 0
    with recording() as r:
        for _ in range(3000):
            cols = random.choice((5, 64, 130, 1024, 4096, 9000, 40_000))
            rows = random.choice((1, 7, 64, 65, *([64 * 128] if cols < 9000 else [])))
            dtypes = [random.choice((BRAIN, SINGLE, torch.float16)) for _ in range(3)]
            x = torch.empty(rows, cols, dtype=dtypes[0])
            if rows == 7:
                x = torch.empty(7, 3, cols + random.choice((0, 16)), dtype=dtypes[0])[:, :2, :cols]
            w = random.choice((None, torch.empty(cols, dtype=dtypes[1])))
            offset, rounding = random.choice((0.0, 1.0)), random.randrange(3)
            dy, rstd = torch.empty(x.shape, dtype=dtypes[2]), torch.empty(*x.shape[:-1], 1)
            if random.random() < 0.4:
                gated(x, dy, w, offset, rounding)
            elif random.random() < 0.5:
                options = w, 1e-6, offset, rounding
                random.choice((operators.forward, operators.forward_train))(x, *options)
                operators.add_forward(x, x, *options)
                wide = torch.empty(x.shape, dtype=random.choice((BRAIN, SINGLE)))
                operators.residual_forward(x, wide, *options, 0, random.random() < 0.5, random.choice((1.0, 0.5)))
            else:
                needed = random.choice(((True, True), (True, False), (False, True)))
                rebuilt = random.choice((None, dtypes[0]))
                operators.backward(dy, x, rstd, w, offset, random.choice((None, x)), rebuilt, *needed)
            launches += len(r.launched)
            r.launched.clear()  # and with it the tensors
        yield from set(r.mistaken)
        if len(r.compiled) > 0.9 * launches or len(r.compiled) < 100:
            yield f"{len(r.compiled)} compilations for {launches} launches"


def gated(x, dy, w, offset, rounding):
    """A random call of a gated or grouped operator."""
    cols, gate = x.shape[-1], random.choice((None, x, torch.empty(x.shape)))
    options = cols // random.choice([n for n in (1, 2, 5) if cols % n == 0]), random.randrange(2), random.random() < 0.5
    if random.random() < 0.5:
        train = random.choice((operators.gated_forward, operators.gated_forward_train))
        train(x, gate, w, 1e-6, offset, rounding, *options)
    else:
        rstd = torch.empty(*x.shape[:-1], cols // options[0])
        need_dx, need_dgate, need_dweight = (random.random() < 0.6 for _ in range(3))
        needed = need_dx, need_dgate and gate is not None, need_dweight
        dy = dy.to(x.dtype) if gate is not None and not options[2] else dy
        operators.gated_backward(dy, x, gate, rstd, w, None, offset, *options, *needed)


def alignment():
    """Multiples of 16 are promised for all pointers and strides, or for none; never for counts."""
    for what, x, promised in (
        ("aligned", x_of(64, 4096), True),
        ("a pointer two bytes off", x_of(64, 4096, offset=1), False),
        ("sixteen bytes off", x_of(64, 4096, offset=8), True),
        ("an odd width", x_of(64, 1001), False),
        ("an odd stride", x_of(64, 4097)[:, :4096], False),
        ("expanded rows", x_of(1, 4096).expand(64, 4096), True),
    ):
        with recording() as r:
            operators.forward_train(x, None, 1e-6)
            _, kernel, _, given, source = r.launched[0]
            names = {kernel.names[index] for (index,) in source.attrs}
            if bool(names) != promised:
                yield f"{what}: {names} are said to be multiples of 16"
            if names & {"rows", "inner", "eps", "reciprocal", "rstd_outer"}:
                yield f"{what}: {names}"
            for name, value in zip(kernel.names, given, strict=True):
                number = value.data_ptr() if isinstance(value, torch.Tensor) else value
                if name in names and number % 16:
                    yield f"{what}: {name} is no multiple of 16: {number}"


def signatures():
    """What is float64 or int64 is so by declaration, never by the value."""
    for op in ("forward", "backward"):
        with recording() as r:
            x = x_of(64 * 128, 4096)
            if op == "forward":
                operators.forward(x, None, 1e-6)
            else:
                operators.backward(x, x, torch.empty(64 * 128, 1), None, 0.0, None, None, True, True)
            signature = r.compiled[0][2].signature
            wanted = {"rows": "i64", "cols": "i32", "x_inner": "i64", "x_outer": "i64", "reciprocal": "fp64"}
            wanted |= {"eps": "fp64"} if op == "forward" else {"log_leaves": "i32"}
            wanted |= {"weight": "constexpr", "offset": "constexpr", "x": "*bf16", "rstd": "constexpr"}
            if op == "backward":
                wanted["rstd"] = "*fp32"
            for name, kind in wanted.items():
                if signature[name] != kind:
                    yield f"{op}: {name} is {signature[name]}, expected {kind}"


def gated_signatures():
    """The same of the gated operators: pointers and strides of each tensor, float64, 64-bit rows."""
    x = x_of(64 * 128, 4096)
    strides = {f"{name}_{part}" for name in ("x", "gate") for part in ("outer", "inner")}
    with recording() as r:
        operators.gated_forward_train(x, x, None, 1e-6, 0.0, 0, 2048, 0, True)
        rest = torch.empty(64 * 128, 2), None, None, 0.0, 2048, 0, False, True, True, True
        operators.gated_backward(x, x, x, *rest)
        for name, _, source, _ in r.compiled[:2]:
            wanted = {
                "rows": "i64",
                "GROUPS": "constexpr",
                "cols": "i32",
                "reciprocal": "fp64",
                "gate": "*bf16",
                "rstd": "*fp32",
            }
            wanted |= {"weight": "constexpr", "offset": "constexpr", **dict.fromkeys(strides, "i64")}
            wanted |= {"eps": "fp64"} if name == "forward" else {"log_leaves": "i32", "dgate": "*bf16"}
            for parameter, kind in wanted.items():
                if source.signature[parameter] != kind:
                    yield f"{name}: {parameter} is {source.signature[parameter]}, expected {kind}"
        if [name for name, *_ in r.compiled] != ["forward", "backward", "fold"]:
            yield f"compiled {[name for name, *_ in r.compiled]}"


def grids():
    """A program for each group, and each piece of it, of all rows or leaves; enough for all, and none too many."""
    sizes = (
        *((1, 1, 1), (1000, 1, 1), (7, 100, 1), (4097, 4096, 1), (3, 100_000, 1), (1, 1 << 20, 1), (20_000, 8, 1)),
        *((70_000, 300, 1), (1, 8, 2), (1000, 16, 3), (5, 5000, 2), (70_000, 128, 4), (300, 9000, 2), (9000, 2048, 4)),
        (1, configurations.MOST_COLS, 1),
    )
    for (rows, cols, groups), gate_first in product(sizes, (False, True, None)):
        call = f"{rows} x {groups} x {cols}"
        with recording() as r:
            x = torch.empty(rows, cols * groups, dtype=BRAIN)
            gate, options = None if gate_first is None else x, (cols, 0, gate_first or False)
            operators.gated_forward(x, gate, None, 1e-6, 0.0, 0, *options)
            rest = torch.empty(rows, groups), None, None, 0.0, *options, True, gate is not None, True
            operators.gated_backward(x, x, gate, *rest)
            for _, kernel, grid, given, _ in r.launched:
                named = dict(zip(kernel.names, given, strict=True))
                if len(grid) != 3 or grid[1] > 65_535:
                    yield f"{call}: {kernel.name} has {grid}"
                if kernel.name == "fold":
                    covered, unit = grid[0] // named["tiles"] * named["LEAVES"], named["LEAVES"]
                    if not 0 <= covered - named["leaves"] < unit:
                        yield f"{call}: {kernel.name} has {grid}"
                    if not 0 <= named["tiles"] * named["BLOCK"] - cols * groups < named["BLOCK"]:
                        yield f"{call}: {kernel.name} has {named['tiles']} tiles of columns"
                    continue
                in_pieces = kernel.name == "backward" and named["LOG_COLS"] is None
                whole = "ROWS" in named and not in_pieces
                if whole and (grid[1] != 1 or named["BLOCK"] < cols):
                    yield f"{call}: {kernel.name} has tiles of {named['BLOCK']}"
                if in_pieces and not 0 <= grid[1] * named["BLOCK"] - cols < named["BLOCK"]:
                    yield f"{call}: {kernel.name} has {grid[1]} pieces"
                units = -(-rows // named.get("ROWS", 1))
                if named.get("partial") is not None:
                    units = fixed_sum.leaves(rows)
                    if 1 << named["log_leaves"] != units:
                        yield f"{call}: leaves of {named['log_leaves']} levels"
                if grid[0] != units * groups or named["GROUPS"] != groups or named["cols"] != cols:
                    yield f"{call}: {kernel.name} has {grid}"
    with recording() as r:
        x, rstd = torch.empty(0, 8), torch.empty(0, 2)
        operators.forward(x, None, 1e-6)
        operators.backward(x, x, torch.empty(0, 1), None, 0.0, None, None, True, False)
        operators.gated_forward(x, x, None, 1e-6, 0.0, 0, 4, 0, False)
        operators.gated_backward(x, x, x, rstd, None, None, 0.0, 4, 0, False, True, True, True)
        if r.launched:
            yield "launches for no rows"


def devices():
    """The tensors' device, whatever the current one is; each has compilations of its own."""
    with recording() as r:
        operators.forward(x_of(64, 4096), None, 1e-6)
        _, kernel, grid, arguments, _ = r.launched[0]
    with recording() as r:
        for index in (None, 1, None, 1):
            launch = launching.prepare(kernel, SimpleNamespace(index=index), grid, arguments, True, 4)
            launch(*arguments[: kernel.tensors])
        if [launched[0] for launched in r.launched] != [0, 1, 0, 1]:
            yield f"launched on {[launched[0] for launched in r.launched]}"
        if r.current != 0:
            yield f"device {r.current} is current afterwards"
        if [c[1].arch for c in r.compiled] != [90, 120]:
            yield f"compiled for {[c[1].arch for c in r.compiled]}"


def forms():
    """The form of the sums for each architecture; what Triton does not know goes to the reference."""
    single, double, floor = 2, 1, 0
    for target, cols, form in (
        *((("cuda", arch, 32), 4096, double) for arch in (70, 80, 90, 100)),
        *((("cuda", arch, 32), 4096, single) for arch in (75, 86, 87, 89, 103, 110, 120, 121)),
        (("cuda", 120, 32), 32, double),
        (("cuda", 120, 32), 33, single),
        (("hip", "gfx942", 64), 4096, floor),
        (("hip", "gfx1100", 32), 4096, floor),
    ):
        with recording(target) as r:
            operators.forward(x_of(64, cols), None, 1e-6)
            _, kernel, _, given, _ = r.launched[0]
            named = dict(zip(kernel.names, given, strict=True))
            if named["FORM"] != form:
                yield f"{target} {cols}: {named['FORM']}"
            if r.compiled[0][3] * target[2] > 1024:
                yield f"{target} {cols}: {r.compiled[0][3]} warps"
    with recording(("cuda", 61, 32)) as r:
        operators.forward(x_of(2, 8).zero_(), None, 1e-6)
        if r.launched:
            yield "launched on an architecture that Triton does not know"


def layouts():
    """Two strides for rows where they are enough, otherwise copies."""
    base = torch.empty(4, 6, 5, 48)
    for x, nested in (
        (base, False),
        (base[0], False),
        (base[:, :, 0], False),
        (base[:, :3], True),
        (base.transpose(0, 1)[:, :, 0], True),
        (base[:, :3, :2], None),
    ):
        place = layout.rows(x, None, x)
        if (None if place is None else place.nested) != nested:
            yield f"{tuple(x.shape)} {x.stride()}: {place}"
        if place is None:
            continue
        numbers = torch.arange(base.numel()).as_strided(x.shape, x.stride(), x.storage_offset())[..., 0].flatten()
        outer, inner = place.strides[:2]
        size = place.inner if place.nested else place.number
        found = [r // size * outer + r % size * inner for r in range(place.number)]
        if found != numbers.tolist() or place.number != numbers.numel():
            yield f"{tuple(x.shape)} {x.stride()}: rows are at {found}"


def replays():
    """A call like an earlier one goes by the dispatcher only where that has something to do."""
    asked = []

    def by_the_dispatcher(name):
        def call(*arguments):
            asked.append(name)
            return arguments[0] if torch.jit.is_tracing() else getattr(operators, name)(*arguments)

        return call

    fast = call_cache.fast(SimpleNamespace(**{name: by_the_dispatcher(name) for name in registration.DOORS}))
    x, weight, rstd = x_of(64, 4096), torch.nn.Parameter(x_of(1, 4096)[0]), torch.empty(64, 1)
    repeated = {
        "forward": (x, weight, 1e-6),
        "forward_train": (x, weight, 1e-6, 1.0, 1),
        "add_forward": (x, x, weight, 1e-6),
        "residual_forward": (x, x, weight, 1e-6, 0.0, 0, 2048, True, 0.5),
        "gated_forward": (x, x, weight, 1e-6, 0.0, 0, 2048, 0, False),
        "gated_forward_train": (x, x, None, 1e-6, 0.0, 0, 2048, 0, True),
        "forward_out": (x, weight, 1e-6, x_of(64, 4096)),
        "gated_forward_out": (x, x_of(64, 4096), weight, 1e-6, 0.0, 0, 2048, 0, False, x),
        "backward": (x, x, rstd, weight, 0.0, None, None, True, True),
        "gated_backward": (x, x, x, torch.empty(64, 2), weight, None, 0.0, 2048, 0, True, True, True, True),
    }
    for name, arguments in repeated.items():
        call = getattr(fast, name)
        with recording() as r:
            found = [shapes(call(*arguments)) for _ in range(3)]
            if asked != [name]:
                yield f"three calls of {name}: the dispatcher has seen {asked}"
            if found[1] != found[0] or found[2] != found[0]:
                yield f"{name}: {found}"
            launches, streams = [(kernel, grid, plain(given)) for _, kernel, grid, given, _ in r.launched], r.streams
            if launches[: len(launches) // 3] * 3 != launches or set(streams) != {r.stream}:
                yield f"{name}: launches differ, or streams: {launches}, {streams}"
            for what, context in SEEN_BY_OTHERS.items():
                asked.clear()
                with context():
                    call(*arguments)
                if asked != [name]:
                    yield f"{name} under {what}: the dispatcher has seen {asked}"
            for (what, strange), place in product((STRANGERS | OTHERS).items(), range(2)):
                asked.clear()
                given = [strange(a) if i == place and a is not None else a for i, a in enumerate(arguments)]
                with contextlib.suppress(RuntimeError):
                    call(*given)
                with contextlib.suppress(RuntimeError):
                    call(*given)
                if asked != [name] * (1 if what in OTHERS else 2):
                    yield f"{name} of {what} as argument {place}: the dispatcher has seen {asked}"
            asked.clear()
    with recording() as r:
        fast.forward(x, weight, 1e-6)
        asked.clear()
        torch.jit.trace(lambda t: fast.forward(t, weight, 1e-6), (x,), check_trace=False)
        if asked != ["forward"]:
            yield f"traced: the dispatcher has seen {asked}"
        for number in range(call_cache.MOST + 10):
            call_cache.store("door", (number,), None)
        if not 0 < call_cache.size() <= call_cache.MOST:
            yield f"{call_cache.size()} prepared calls"


def the_short_way():
    """It hands Triton's launcher what `compiled[grid]` does, less hooks where none is set."""
    asked = []
    compiled = object.__new__(launching.CompiledKernel)
    compiled.name, compiled.src, compiled.module, compiled.function, compiled.packed_metadata = "k", None, 1, 2, 3
    compiled._run = lambda *arguments: asked.append(arguments)
    with recording() as r:
        compiled[4, 5, 6]("x", None, 7, stream=r.stream)
        launch = launching.Launch(compiled, SimpleNamespace(index=None), (4, 5, 6), (7,))
        if launch._run is None:
            yield f"Triton {triton.__version__} is not known"
        launch("x", None)
        triton.knobs.runtime.launch_enter_hook.add(print)
        launch("x", None)
        triton.knobs.runtime.launch_enter_hook.remove(print)
    (triton_s, ours, hooked), hooks = asked, slice(6, 9)
    if ours != (*triton_s[: hooks.start], None, None, None, *triton_s[hooks.stop :]):
        yield f"{ours} instead of {triton_s}"
    if hooked[hooks.start + 1] is not triton.knobs.runtime.launch_enter_hook:
        yield f"a hook is not called: {hooked}"


def shapes(results):
    results = results if isinstance(results, tuple) else (results,)
    return [None if t is None else (t.shape, t.stride(), t.dtype) for t in results]


def plain(arguments):
    """Arguments of a launch, less the memory that is another each time."""
    return [(a.shape, a.dtype) if isinstance(a, torch.Tensor) else a for a in arguments]


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), kwargs=None):
        return function(*arguments, **(kwargs or {}))


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), kwargs=None):
        return function(*arguments, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


SEEN_BY_OTHERS = {
    "a dispatch mode": DispatchMode,
    "a function mode": FunctionMode,
    "the profiler": torch.profiler.profile,
    "a functorch transform": lambda: torch._functorch.eager_transforms.grad_increment_nesting(),
}
# Tensors that are not plain memory, as far as they are the type of one.
STRANGERS = {
    "a negative view": lambda t: torch._neg_view(t),
    "zeros without memory": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
    "a subclass": lambda t: t.as_subclass(Subclass),
    "a batch of the older vmap": lambda t: torch._add_batch_dim(torch.stack((t, t)), 0, 1),
}
OTHERS = {
    "another alignment": lambda t: torch.cat((t.flatten()[:1], t.flatten()))[1:].view(t.shape),
}


def registrations():
    """Where PyTorch has a GPU the operators are registered for it; nothing imports them before the first call."""
    registered = torch.library.Library("rmsnorm", "IMPL")
    registration.register(registered)
    for name in registration.DOORS:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"rmsnorm::{name}", "CUDA"):
            yield f"{name} has no kernel for CUDA"
        if not callable(registration.implementation(name)) or not callable(getattr(fallback, name)):
            yield f"{name} is no operator"
        names = tuple(argument.name for argument in getattr(torch.ops.rmsnorm, name).default._schema.arguments)
        if names != calls.PARAMETERS[name]:
            yield f"{name} has {names}, and here {calls.PARAMETERS[name]}"
    versions = torch.version.cuda, torch.version.hip
    for torch.version.cuda, torch.version.hip in ((None, None), ("13.0", None), (None, "7.0")):
        if (availability.missing() is None) != (torch.version.cuda is not None or torch.version.hip is not None):
            yield f"{torch.version.cuda}, {torch.version.hip}: {availability.missing()}"
    torch.version.cuda, torch.version.hip = versions
    registered._destroy()


CHECKS = (
    one_compilation_for_each_kind_of_call,
    keys,
    alignment,
    signatures,
    gated_signatures,
    grids,
    devices,
    forms,
    layouts,
    replays,
    the_short_way,
    registrations,
)

if __name__ == "__main__":
    print(json.dumps({check.__name__: list(check()) for check in CHECKS}))
