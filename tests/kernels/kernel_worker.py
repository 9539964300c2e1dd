"""`python -m tests.kernels.kernel_worker DIRECTORY` runs saved cases on the kernels here and reports what differs.

The instruction set is chosen once per process, by RMSNORM_ISA, so test_kernels.py starts one of these for each.
"""

import ctypes
import ctypes.util
import json
import math
import platform
import struct
import sys
from itertools import islice, product
from pathlib import Path

import torch

from tests.kernels import modulation_worker, rotation_worker
from tests.support.bits import difference

THREADS = (1, 2, 3)
# Below this many elements the operators use one thread whatever they are offered (csrc/ops/threads.h).
SPLIT = 16384
# Every so many cases are run again in other floating-point environments; a prime, so that all dtypes are met.
SAMPLE = 23
FE_UPWARD = {"x86_64": 0x800, "aarch64": 0x400000}


def compare(case):
    """Every difference between the kernels and the expected results of a case, as text."""
    name, op, arguments, expected = case
    for what, found, wanted in OPERATORS[op](*arguments, expected):
        if found is None and wanted is None:
            continue
        if (wrong := difference(found, wanted)) is not None:
            yield f"{name}: {what}: {wrong}"


def normalize(x, weight, eps, offset, rounding, expected):
    """`forward`, `forward_train` and `forward_out` into every kind of memory."""
    ops, options = torch.ops.rmsnorm, (weight, eps, offset, rounding)
    y_wanted, rstd_wanted = expected
    before = x.clone()
    yield "y", ops.forward(x, *options), y_wanted
    y, rstd = ops.forward_train(x, *options)
    yield "y in training", y, y_wanted
    yield "rstd", rstd, rstd_wanted
    yield "x afterwards", x, before

    out = torch.full(x.shape, torch.nan, dtype=y.dtype)
    if not (adjacent(x) and adjacent(weight)):
        # Those would be copied, and whether out lies apart from them could not be known: functional.py's case.
        yield (
            "refusal of strided columns",
            torch.tensor(refuses(x, *options[:2], out, *options[2:])),
            torch.tensor(True),
        )
        x, weight = x.contiguous(), None if weight is None else weight.contiguous()
        options = (weight, *options[1:])
    ops.forward_out(x, *options[:2], out, *options[2:])
    yield "out", out, y_wanted
    if x.numel() > 100_000:
        return
    # Rows three elements apart and beginning at an odd address; nothing around them may change.
    around = torch.full((math.prod(x.shape[:-1]) * (x.shape[-1] + 3) + 1,), 7.0, dtype=y.dtype)
    rows = around[1:].unflatten(0, (-1, x.shape[-1] + 3)) if x.numel() else around.new_empty(0, x.shape[-1] + 3)
    out = rows[:, : x.shape[-1]]
    ops.forward_out(x.reshape(-1, x.shape[-1]), *options[:2], out, *options[2:])
    yield "strided out", out.clone(), y_wanted.reshape(out.shape)
    out.fill_(7.0)
    yield "what lies around out", around, torch.full_like(around, 7.0)
    if y.dtype == x.dtype:
        x = copy_with_strides(x)
        ops.forward_out(x, *options[:2], x, *options[2:])
        yield "out=x", x, y_wanted


def adjacent(t):
    return t is None or t.shape[-1] == 1 or t.stride(-1) == 1


def refuses(*arguments):
    try:
        torch.ops.rmsnorm.forward_out(*arguments)
    except RuntimeError:
        return True
    return False


def copy_with_strides(x):
    """A copy laid out in memory as x is, where out may be: adjacent columns, and no element in two places."""
    places = torch.arange(x.untyped_storage().nbytes() // x.element_size())
    places = places.as_strided(x.shape, x.stride(), x.storage_offset())
    if x.stride(-1) != 1 or places.unique().numel() < x.numel():
        return x.contiguous().clone()
    return x.new_empty(0).set_(x.untyped_storage().clone(), x.storage_offset(), x.shape, x.stride())


def add(x, residual, weight, eps, offset, rounding, expected):
    found = torch.ops.rmsnorm.add_forward(x, residual, weight, eps, offset, rounding)
    yield from zip(("y", "h", "rstd"), found, expected, strict=True)


def backward(dy, x, rstd, weight, offset, dh, expected, rebuilt_dtype=None):
    """All combinations of gradients that can be asked for; what is not wanted is None."""
    for need_dx in (True, False):
        for need_dweight in (True, False):
            found = torch.ops.rmsnorm.backward(dy, x, rstd, weight, offset, dh, rebuilt_dtype, need_dx, need_dweight)
            for what, needed, f, e in zip(("dx", "dweight"), (need_dx, need_dweight), found, expected, strict=True):
                yield f"{what} (need {need_dx}, {need_dweight})", f, e if needed else None


def rebuild(dy, y, rstd, weight, offset, dh, x_dtype, expected):
    kept = y.clone()
    yield from backward(dy, y, rstd, weight, offset, dh, expected, x_dtype)
    yield "y afterwards", y, kept


def residual(*arguments):
    *arguments, expected = arguments
    before = [t.clone() for t in arguments[:2]]
    yield from zip(("y", "h", "rstd"), torch.ops.rmsnorm.residual_forward(*arguments), expected, strict=True)
    yield from zip(("x afterwards", "residual afterwards"), arguments, before, strict=False)


def norm_add(x, residual, weight, *options):
    """`norm_add_forward`, and `norm_add_norm_forward`, whose second norm has the same weight and another eps."""
    eps, offset, rounding, expected = options
    before = [x.clone(), residual.clone()]
    ops = torch.ops.rmsnorm
    yield from zip(
        ("h", "rstd"), ops.norm_add_forward(x, residual, weight, eps, offset, rounding), expected, strict=True
    )
    y, h, rstd, next_rstd = ops.norm_add_norm_forward(x, residual, weight, weight, eps, 1e-3, offset, rounding)
    yield from zip(("h before a norm", "rstd before a norm"), (h, rstd), expected, strict=True)
    n = ops.forward(x, weight, eps, offset, rounding)
    y_of_h, _, rstd_of_h = ops.residual_forward(n, residual, weight, 1e-3, offset, rounding, 0, False, 1.0)
    yield from (("y of h", y, y_of_h), ("rstd of h", next_rstd, rstd_of_h))
    yield from zip(("x afterwards", "residual afterwards"), (x, residual), before, strict=True)


def gated(x, gate, *rest):
    *options, (y_wanted, rstd_wanted) = rest
    yield from gated_out(x, gate, *options, y_wanted)
    before = [None if t is None else t.clone() for t in (x, gate)]
    y, rstd = torch.ops.rmsnorm.gated_forward_train(x, gate, *options)
    yield "y", torch.ops.rmsnorm.gated_forward(x, gate, *options), y_wanted
    yield "y in training", y, y_wanted
    yield "rstd", rstd, rstd_wanted
    for what, now, then in zip(("x", "gate"), (x, gate), before, strict=True):
        if now is not None:
            yield f"{what} afterwards", now, then


def gated_out(x, gate, weight, *rest):
    """`gated_forward_out` into rows that lie apart, and, where it fits, into x itself."""
    *options, y_wanted = rest
    if not all(map(adjacent, (x, gate, weight))) or x.numel() > 100_000 or x.dim() != 2:
        return
    around = torch.full((len(x), x.shape[1] + 3), 7.0, dtype=y_wanted.dtype)
    out = around[:, : x.shape[1]]
    torch.ops.rmsnorm.gated_forward_out(x, gate, weight, *options, out)
    yield "out", out.clone(), y_wanted
    out.fill_(7.0)
    yield "what lies around out", around, torch.full_like(around, 7.0)
    if y_wanted.dtype == x.dtype and len(x) * x.stride(0) >= x.numel():
        x = x.contiguous().clone()
        torch.ops.rmsnorm.gated_forward_out(x, gate, weight, *options, x)
        yield "out=x", x, y_wanted


def gated_backward(dy, x, gate, *rest):
    *arguments, expected = rest
    wanted = dict(zip(("dx", "dgate", "dweight") if gate is not None else ("dx", "dweight"), expected, strict=True))
    for needs in product((True, False), repeat=len(wanted)):
        needed = dict(zip(wanted, needs, strict=True))
        flags = [needed.get(what, False) for what in ("dx", "dgate", "dweight")]
        found = torch.ops.rmsnorm.gated_backward(dy, x, gate, *arguments, *flags)
        for what, f in zip(("dx", "dgate", "dweight"), found, strict=True):
            if what in wanted:
                yield f"{what} (need {flags})", f, wanted[what] if needed[what] else None


OPERATORS = {
    "normalize": normalize,
    "add": add,
    "backward": backward,
    "rebuild": rebuild,
    "gated": gated,
    "gated_backward": gated_backward,
    "residual": residual,
    "norm_add": norm_add,
    "modulated": modulation_worker.modulated,
    "modulated_backward": modulation_worker.modulated_backward,
    "rotated": rotation_worker.rotated,
    "rotated_backward": rotation_worker.rotated_backward,
}


def run(cases):
    """Differences over all cases; those that are split run with several numbers of threads, or, if huge, with two."""
    for case in cases:
        size = case[2][0].numel()
        for threads in THREADS[:1] if size <= SPLIT else THREADS if size < 2**20 else THREADS[1:2]:
            torch.set_num_threads(threads)
            yield from (f"{text} [{threads} threads]" for text in compare(case))


# ---------------------------------------------------------------- the floating-point environment


def mode():
    """MXCSR's or FPCR's control bits for this thread; the low six bits of MXCSR are flags of what happened."""
    environment = (ctypes.c_uint8 * 64)()
    ctypes.CDLL(ctypes.util.find_library("m")).fegetenv(environment)
    if FE_UPWARD[machine()] == FE_UPWARD["x86_64"]:
        return struct.unpack_from("<I", environment, 28)[0] & ~0x3F
    return struct.unpack_from("<I", environment, 0)[0]


def machine():
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())


def pool_is_ieee():
    """Whether every thread of torch's pool rounds to nearest and keeps subnormals.

    1 + 3 * 2^-25 is 1 + 2^-23 to nearest and 1 toward zero; each thread has its share of the elements.
    """
    small, one = torch.full((1 << 20,), 3 * 2.0**-25), torch.ones(1 << 20)
    subnormal = torch.full((1 << 20,), 2.0**-140)
    return bool((one + small == 1 + 2.0**-23).all()) and bool((subnormal * one == 2.0**-140).all())


def environment(cases):
    """The kernels compute in their own environment, whatever the caller's is, and leave the caller's as it was."""
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    initial = mode()
    torch.set_num_threads(2)
    for case in cases:
        list(compare(case))
        if mode() != initial:
            yield f"{case[0]}: the mode is {mode():#x} afterwards, it was {initial:#x}"
        if not pool_is_ieee():
            yield f"{case[0]}: the threads of the pool no longer round to nearest or flush subnormals"
    settings = {
        "flushing subnormals": (lambda: torch.set_flush_denormal(True), lambda: torch.set_flush_denormal(False)),
        "rounding upward": (lambda: libm.fesetround(FE_UPWARD[machine()]), lambda: libm.fesetround(0)),
    }
    for name, (begin, end) in settings.items():
        for case in cases:
            arguments, expected = case[2:]
            begin()
            changed = mode()
            # Only the kernels run in that mode: what compares them would flush and round as well.
            results = [(what, found.clone(), wanted) for what, found, wanted in FIRST[case[1]](*arguments, expected)]
            after = mode()
            end()
            if changed == initial:
                yield f"{name} could not be set: nothing was tested"
            if after != changed:
                yield f"{case[0]}: {name}: the mode is {after:#x} afterwards, it was {changed:#x}"
            for what, found, wanted in results:
                if (wrong := difference(found, wanted)) is not None:
                    yield f"{case[0]}: {name}: {what}: {wrong}"
    if mode() != initial:
        yield "the environment was not restored by this test"


def first_results(op):
    """The operator's main results only, without copies or comparisons in between."""

    def call(*arguments):
        *arguments, expected = arguments
        found = getattr(torch.ops.rmsnorm, op)(*arguments)
        return [(f"result {index}", f, e) for index, (f, e) in enumerate(zip(found, expected, strict=True))]

    return call


FIRST = {
    "normalize": first_results("forward_train"),
    "add": first_results("add_forward"),
    "backward": lambda *a: first_results("backward")(*a[:-1], None, True, True, a[-1]),
    "rebuild": lambda *a: first_results("backward")(*a[:-1], True, True, a[-1]),
    "gated": first_results("gated_forward_train"),
    "residual": first_results("residual_forward"),
    "norm_add": first_results("norm_add_forward"),
    "modulated": first_results("modulated_forward_train"),
    "modulated_backward": lambda *a: [
        r for r in islice(modulation_worker.modulated_backward(*a), 4) if r[2] is not None
    ],
    "rotated": first_results("rotary_forward"),
    "rotated_backward": lambda *a: list(islice(rotation_worker.rotated_backward(*a), 2)),
    "gated_backward": lambda *a: list(islice(gated_backward(*a), len(a[-1]))),  # all of them wanted
}


def main(directory):
    """Prints {"isa": ..., "failures": {group: [text, ...]}} as JSON."""
    failures = {}
    for path in sorted(directory.glob("*.pt")):
        failures[path.stem] = list(run(torch.load(path, mmap=True)))
    some = [case for path in sorted(directory.glob("*.pt")) for case in torch.load(path, mmap=True)[::SAMPLE]]
    failures["environment"] = list(environment(some))
    print(json.dumps({"isa": torch.ops.rmsnorm.isa(), "failures": failures}))


if __name__ == "__main__":
    import rmsnorm  # noqa: F401 - registers the operators

    main(Path(sys.argv[1]))
