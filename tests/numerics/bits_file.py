"""The cases of docs/bits.json: inputs made of integers alone, and a hash of each result (docs/bits.md).

`python -m tests.numerics.bits_file` says what differs from the file; with `--write` it adds the cases that the file
lacks. A hash that stands in the file is a promise and is never replaced.
"""

import hashlib
import itertools
import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

import torch

import rmsnorm

FILE = Path(__file__).parents[2] / "docs" / "bits.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROUNDINGS = ("once", "before_scale", "weight_dtype")
# form: groups of this many elements, and the gate's activation and place; "add" has a residual.
FORMS = ("plain", "add", "groups", "silu last", "silu first", "sigmoid last", "sigmoid first", "silu last groups")
MAGNITUDES = ("ones", "small", "large", "mixed", "outlier", "zeros")
_MASK = (1 << 64) - 1


class Case(NamedTuple):
    """One call. `weight` is its weight's dtype or "none"; groups have `cols` / 4 elements."""

    form: str
    dtype: str
    weight: str
    rounding: str
    weight_offset: float
    rows: int
    cols: int
    magnitude: str

    @property
    def name(self):
        offset = f"{self.weight_offset:g}"
        return "/".join((*self[:4], offset, f"{self.rows}x{self.cols}", self.magnitude)).replace(" ", "-")


def cases():
    """All of them, in the file's order."""
    types = [(d, w, r) for d in DTYPES for w in (*DTYPES, "none") for r in ROUNDINGS]
    for form, (dtype, weight, rounding) in itertools.product(FORMS, types):
        yield Case(form, dtype, weight, rounding, 0.0, 3, 44, "ones")
    for form, dtype, magnitude in itertools.product(FORMS, DTYPES, MAGNITUDES):
        yield Case(form, dtype, "float32", "once", 1.0, 7, 1024, magnitude)
    for form, dtype in itertools.product(FORMS, DTYPES):
        for rows, cols in ((1, 4), (130, 68), (1, 4096), (2, 5004), (300, 16)):
            yield Case(form, dtype, dtype, "before_scale", 0.0, rows, cols, "mixed")
    for form, dtype in itertools.product(("plain", "add", "silu last", "silu first"), DTYPES):
        for rows, cols in ((5, 1), (4, 3), (9, 127), (3, 1023)):
            yield Case(form, dtype, "float32", "once", 0.0, rows, cols, "outlier")


def words(seed, count):
    """SplitMix64: 64-bit integers from a seed."""
    found, state = [], seed
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        found.append(z ^ (z >> 31))
    return found


def tensor(seed, rows, cols, dtype, magnitude="ones"):
    """(rows, cols): u * 2^e with u = (top 23 bits - 2^22) * 2^-21, and e as the magnitude says; docs/bits.md."""
    z = words(seed, rows * cols)
    u = torch.tensor([(w >> 41) - (1 << 22) for w in z], dtype=torch.float64).view(rows, cols) * 2.0**-21
    far = 8 if dtype == torch.float16 else 100
    e = torch.zeros(rows, cols, dtype=torch.float64)
    if magnitude in ("small", "large"):
        e += far if magnitude == "large" else -far
    elif magnitude == "mixed":
        spread = 4 if dtype == torch.float16 else 32
        e = torch.tensor([(w & 255) % (2 * spread) - spread for w in z], dtype=torch.float64).view(rows, cols)
    elif magnitude == "outlier":
        for row in range(rows):
            e[row, 7 * row % cols] = far / 4
    if magnitude == "zeros":
        u[::3] = 0.0
    return (u * e.apply_(lambda exponent: math.ldexp(1.0, int(exponent)))).float().to(dtype)


def inputs(case):
    """x, the residual or the gate, the weight, and the gradients of the results, with seeds 1 to 5."""
    dtype = DTYPES[case.dtype]
    x = tensor(1, case.rows, case.cols, dtype, case.magnitude)
    other = tensor(2, case.rows, case.cols, dtype, case.magnitude if case.form == "add" else "ones")
    weight = None if case.weight == "none" else tensor(3, 1, case.cols, DTYPES[case.weight])[0]
    return x, other, weight


def results(case):
    """The results and gradients by name, from the public functions."""
    x, other, weight = inputs(case)
    x.requires_grad_()
    options = {"weight_offset": case.weight_offset, "rounding": case.rounding}
    group_size = case.cols // 4 if "groups" in case.form else None
    wanted = {"dx": x}
    if weight is not None:
        wanted["dweight"] = weight.requires_grad_()
    if case.form == "add":
        y, h = rmsnorm.add_rms_norm(x, other, weight, 1e-6, **options)
        found = {"y": y, "h": h}
    elif case.form in ("plain", "groups"):
        found = {"y": rmsnorm.rms_norm(x, weight, 1e-6, group_size=group_size, **options)}
    else:
        activation, place = case.form.split()[:2]
        wanted["dgate"] = other.requires_grad_()
        options |= {"activation": activation, "norm_before_gate": place == "last", "group_size": group_size}
        found = {"y": rmsnorm.gated_rms_norm(x, other, weight, 1e-6, **options)}
    upstream = [tensor(4 + i, case.rows, case.cols, t.dtype) for i, t in enumerate(found.values())]
    gradients = torch.autograd.grad(list(found.values()), list(wanted.values()), upstream)
    return found | dict(zip(wanted, gradients, strict=True))


def digest(t):
    """The first 16 hexadecimal digits of SHA-256 over the elements' bytes, row by row; all NaN are one."""
    t = t.detach().contiguous()
    integers = {2: torch.int16, 4: torch.int32}[t.element_size()]
    nan = torch.tensor(float("nan"), dtype=t.dtype).view(integers) & ~(1 << (8 * t.element_size() - 1))
    bits = torch.where(t.isnan(), nan, t.view(integers))
    return hashlib.sha256(bits.numpy().tobytes()).hexdigest()[:16]


def differences():
    """What this machine computes differently, case by case, and the cases that the file lacks."""
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    different, new = [], {}
    for case in cases():
        hashes = {name: digest(t) for name, t in results(case).items()}
        if case.name not in known:
            new[case.name] = hashes
        elif known[case.name] != hashes:
            wrong = [name for name, value in hashes.items() if known[case.name].get(name) != value]
            different.append(f"{case.name}: {', '.join(wrong)}")
    return different, new


def main():
    different, new = differences()
    if "--write" in sys.argv and new:
        known = json.loads(FILE.read_text()) if FILE.exists() else {}
        lines = (f"{json.dumps(name)}: {json.dumps(hashes)}" for name, hashes in (known | new).items())
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        print(f"{len(new)} cases written")
        new = {}
    print("\n".join([*different, *(f"{name}: not in the file" for name in new)]) or "no difference")
    return bool(different or new)


if __name__ == "__main__":
    sys.exit(main())
