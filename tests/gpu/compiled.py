"""The kernels as the operators launch them, compiled for GPUs that are not here, and what their machine code says."""

import contextlib
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget

from rmsnorm.gpu import call_cache, configurations, launching, operators
from rmsnorm.gpu.kernels import fixed_sum

TARGETS = (
    *(GPUTarget("cuda", arch, 32) for arch in (80, 90, 100, 120)),
    GPUTarget("hip", "gfx942", 64),
)
SINGLE, BRAIN = torch.float32, torch.bfloat16
DTYPES = ((BRAIN, BRAIN), (SINGLE, SINGLE), (BRAIN, SINGLE))  # of x and of the weight
# One of each line of configurations.py's tables, full and with a rest, and one in pieces.
WIDTHS = (64, 128, 192, 512, 768, 1024, 2048, 2880, 4096, 5120, 8192, 12288, 16384, 65536)
# Forms of a call: what comes around the norm. Rows of groups, and those with a gate, are two groups of `cols`.
PLAIN = ("forward", "add", "exact sum", "backward", "dx", "one row", "few rows")
# Whether the gate comes first, and its dtype; None without a gate.
GATES = {"gate first": (True, BRAIN), "gate last": (False, BRAIN), "float32 gate last": (False, SINGLE), "groups": None}
GROUPED = (*GATES, *(f"{form} backward" for form in GATES), "grouped sum")
GROUPED_WIDTHS = (128, 512, 768, 2048, 4096, 5120, 12288)
ROW_TENSORS = ("x", "residual", "gate", "y", "h", "dy", "dh", "dx", "dgate", "rebuilt")
BINARIES = Path(nvidia.__file__).parent / "bin"


@dataclass(frozen=True)
class Code:
    """One kernel, compiled."""

    target: Any
    op: str
    kernel: str
    x: torch.dtype
    weight: torch.dtype
    cols: int
    rows: int
    block: int
    warps: int
    form: int | None
    row_tensors: int
    leaf: bool
    compiled: Any
    messages: str

    @property
    def arch(self):
        return f"sm_{self.target.arch}" if self.target.backend == "cuda" else self.target.arch

    def __str__(self):
        types = "/".join(str(t).removeprefix("torch.") for t in (self.x, self.weight))
        return (
            f"{self.arch} {self.op} {self.cols} {types}: {self.kernel} {self.rows} x {self.block}, {self.warps} warps"
        )


def call(op, x_dtype, weight_dtype, cols):
    """Calls an operator on memory that is never touched."""
    rows = {"one row": 1, "few rows": 8}.get(op, 64 * configurations.FUSED_LEAVES)
    groups = 2 if op in GROUPED else 1
    width = groups * cols
    x, weight = torch.empty(rows, width, dtype=x_dtype), torch.empty(width, dtype=weight_dtype)
    rstd = torch.empty(rows, groups)
    if op == "forward":
        operators.forward_train(x, weight, 1e-6)
    elif op == "add":
        operators.add_forward(x, x, weight, 1e-6, 1.0, 1)
    elif op in ("exact sum", "grouped sum"):
        operators.residual_forward(x, x.float(), weight, 1e-6, 1.0, 1, cols, op == "exact sum", 0.5)
    elif op in PLAIN:
        operators.backward(x, x, rstd, weight, 1.0, x if op == "backward" else None, None, True, op != "dx")
    else:
        form = GATES[op.removesuffix(" backward")]
        first, gate_dtype = form or (False, x_dtype)
        gate, options = None if form is None else x.to(gate_dtype), (cols, 0, first)
        if op in GATES:
            operators.gated_forward_train(x, gate, weight, 1e-6, 1.0, 1, *options)
        else:
            dh, needed = x if form is None else None, (True, form is not None, True)
            operators.gated_backward(x, x, gate, rstd, weight, dh, 1.0, *options, *needed)


def compile_all(
    target, op, x_dtype, weight_dtype, cols, change=lambda kernel, aligned: (kernel, aligned), options=None, known=None
):
    """The kernels of one call, as `Code`, but those in `known`. Tests change what is compiled, and expect it found."""
    found = []

    def compile_instead(kernel, device, grid, arguments, aligned, warps):
        changed, aligned = change(kernel, aligned)
        if known is not None:
            identity = target, warps, kernel.name, changed.source(arguments, aligned).hash()
            if identity in known:
                return lambda *tensors: None
            known.add(identity)
        with messages() as said:
            compiled = compile_one(target, changed, arguments, aligned, warps, options or {})
        named = dict(zip(kernel.names, arguments, strict=True))
        block, form = named["BLOCK"], named.get("FORM")
        code = Code(
            *(
                target,
                op,
                kernel.name,
                x_dtype,
                weight_dtype,
                cols,
                named.get("ROWS", named.get("LEAVES", 1)),
                block,
                warps,
                form,
                sum(named.get(name) is not None for name in ROW_TENSORS),
                named.get("partial") is not None and kernel.name == "backward",
            ),
            *(compiled, said()),
        )
        found.append(code)
        return lambda *tensors: None

    prepare, launching.prepare = launching.prepare, compile_instead
    launching._targets[None] = target
    call_cache.clear()
    try:
        call(op, x_dtype, weight_dtype, cols)
    finally:
        launching.prepare = prepare
        call_cache.clear()
    return found


def compile_one(target, kernel, arguments, aligned, warps, options):
    if not options:
        return launching.compile_for(target, kernel, arguments, aligned, warps)
    return launching.triton.compile(
        kernel.source(arguments, aligned), target=target, options={"num_warps": warps, **options}
    )


@contextlib.contextmanager
def messages():
    """What the compiler, which is no Python, writes to standard error."""
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: said
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            said = file.read().decode()


# ---------------------------------------------------------------- reading


def facts(code):
    """Registers, spills, instructions, accesses to memory: all of them, and those of 16 bytes."""
    return _facts_of_amd(code) if code.target.backend == "hip" else _facts_of_nvidia(code)


def _facts_of_nvidia(code):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.compiled.asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        listing = _run("nvdisasm", "-c", file.name)
    instructions = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", listing, re.MULTILINE)

    def count(pattern):
        return sum(re.match(pattern, i) is not None for i in instructions)

    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "spills": count("LDL|STL"),
        "instructions": len(instructions),
        "loads": count("LDG"),
        "wide loads": count(r"LDG\..*128"),
        "stores": count("STG"),
        "wide stores": count(r"STG\..*128"),
        "sums": len(re.findall(r"fma\.rz\.f(?:32|64)", code.compiled.asm["ptx"])),
    }


def _run(tool, *arguments):
    return subprocess.run([BINARIES / tool, *arguments], capture_output=True, text=True, check=True).stdout


def _facts_of_amd(code):
    text = code.compiled.asm["amdgcn"]

    def count(pattern):
        return len(re.findall(pattern, text, re.MULTILINE))

    return {
        "registers": int(re.search(r"\.vgpr_count:\s*(\d+)", text)[1]),
        "spills": sum(int(n) for n in re.findall(r"\.[sv]gpr_spill_count:\s*(\d+)", text)),
        "instructions": count(r"^\t[sv]_|^\t(?:global|buffer|ds|flat)_"),
        "loads": count(r"^\t(?:global|buffer)_load"),
        "wide loads": count(r"^\t(?:global|buffer)_load_dwordx4"),
        "stores": count(r"^\t(?:global|buffer)_store"),
        "wide stores": count(r"^\t(?:global|buffer)_store_dwordx4"),
        "sums": count("v_floor_f64"),
    }


# ---------------------------------------------------------------- what must hold

# Fused multiplications and additions that AMD's compiler makes of one division or square root of float64.
_FUSED_IN_DIVISION, _FUSED_IN_ROOT = 5, 7


def _narrow(code, found):
    """How many loads and stores may be narrow: numbers per row, and the weight where a program has several rows."""
    vectors = max(1, code.rows * code.block * code.x.itemsize // (16 * code.warps * code.target.warp_size))
    per_row = (1 + vectors if code.rows > 1 else 1, 0)
    per_column = (found["wide loads"], 0)  # of each row two vectors and up to two numbers, however often unrolled
    return {
        "forward": (vectors if code.rows > 1 else 0, vectors),
        "forward_in_pieces": (0, 1),
        "backward": per_column if code.form is None else per_row,
        "slopes": (1, 1),
        "fold": (0, 1),  # dweight in 16 bits
    }[code.kernel]


def faults(code):
    """Everything that is wrong with a kernel, as text; and its facts."""
    found = facts(code)
    said = list(_faults(code, found))
    return [f"{code}: {text}" for text in said], found


def _faults(code, found):
    if found["spills"]:
        yield f"{found['spills']} spills"
    for kind, narrow in zip(("loads", "stores"), _narrow(code, found), strict=True):
        if found[kind] - found[f"wide {kind}"] > narrow:
            yield f"only {found[f'wide {kind}']} of {found[kind]} {kind} have 16 bytes"
    if found["sums"] != (expected := _sums(code)):
        yield f"{found['sums']} instructions of the exact sums, expected {expected}"
    ttir = code.compiled.asm["ttir"]
    wide = len(re.findall(r"arith\.muli .*i64", ttir))
    if wide < code.row_tensors:
        yield f"{wide} products of 64 bits: rows more than 2^31 elements away"
    # Where a leaf begins is the one shift of a number that is no tensor.
    shifts = set(re.findall(r"arith\.shrsi .* : (i\d+)", ttir))
    if "i32" in shifts or (code.leaf and not shifts):
        yield "leaves do not begin at rows counted in 64 bits"
    for name in re.findall(r"%(eps|reciprocal): f32", ttir):
        yield f"{name} is a float32"
    if code.target.backend == "hip":
        yield from _faults_of_amd(code)
    else:
        ptx = code.compiled.asm["ptx"]
        # x + residual in bfloat16 may be one instruction, which rounds once as the float32 sum does that it replaces.
        if n := len(re.findall(r"fma\.rn\.(?:ftz\.)?f(?:32|64)", ptx)):
            yield f"{n} contracted multiplications and additions"
        if n := ptx.count(".ftz"):
            yield f"{n} instructions that flush subnormals"
        if n := len(re.findall(r"(?:div|sqrt|rcp|rsqrt|ex2|lg2)\.(?:approx|full)", ptx)):
            yield f"{n} approximations"


def _sums(code):
    """FMAs toward zero, or floors, that a thread executes once for each of its elements."""
    if code.form is None:
        return 0
    elements = code.rows * code.block // (code.warps * code.target.warp_size)
    return elements * (2 if code.form == fixed_sum.SINGLE.value else 1)


def _faults_of_amd(code):
    text = code.compiled.asm["amdgcn"]
    if code.messages:
        yield f"the compiler says {code.messages[:200]!r}"
    if n := len(re.findall(r"v_(?:pk_)?(?:fma|fmac|mad|mac)\w*_f32", text)):
        yield f"{n} contracted multiplications and additions"
    divisions, roots = text.count("v_div_fixup_f64"), text.count("v_rsq_f64")
    fused = len(re.findall(r"v_(?:fma|fmac)_f64", text))
    if n := fused - divisions * _FUSED_IN_DIVISION - roots * _FUSED_IN_ROOT:
        yield f"{n} contracted multiplications and additions of float64"
    if n := len(re.findall(r"v_(?:exp|log|rcp|rsq|sqrt)_f32", text)):
        yield f"{n} approximations"
    if not all(mode in text for mode in ("float_denorm_mode_32 3", "float_denorm_mode_16_64 3")):
        yield "subnormals are flushed"
