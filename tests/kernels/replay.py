"""Builds replay.cpp over the kernels, and runs cases of kernel_cases.py through it.

It needs no PyTorch, so it can be built for another processor and run under an emulator (test_neon.py), or with
sanitizers, which then see nothing but our code (test_sanitizers.py).
"""

import math
import os
import platform
import re
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from rmsnorm.numerics import reference
from rmsnorm.spec import NormSpec
from tests.kernels.kernel_calls import x_hat_type
from tests.support.bits import difference

ROOT = Path(__file__).parents[2]
_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def host():
    return "aarch64" if platform.machine() in ("aarch64", "arm64") else "x86_64"


def flags():
    """What CMakeLists.txt compiles kernels with: flags for all, and {instruction set: its own}."""
    text = re.sub(r"#.*", "", (ROOT / "CMakeLists.txt").read_text())
    everywhere = re.search(r"add_compile_options\((-O3[^)]*)\)", text)[1].split()
    kernels = re.search(r"target_compile_options\(kernels_\$\{isa\} PRIVATE ([^$]*)\$\{ARGN\}", text)[1].split()
    variables = dict(re.findall(r"set\((AVX\w+) ([^)]*)\)", text))
    own = {
        isa: re.sub(r"\$\{(\w+)\}", lambda name: variables[name[1]], options).split()
        for isa, options in re.findall(r"add_kernels\((\w+)([^)]*)\)", text)
    }
    assert "-ffp-contract=off" in everywhere
    assert set(own) == {"PORTABLE", "AVX2", "AVX512", "AVX512_BF16", "NEON"}
    return [*everywhere, "-std=c++17"], kernels, own


def compile_file(directory, source, target, *options, compiler="g++"):
    path = directory / f"{target}.o"
    run(compiler, *flags()[0], *options, "-c", str(ROOT / source), "-o", str(path))
    return path


def compile_kernels(directory, isa, options=(), compiler="g++"):
    """One instruction set's kernels. `options` come last, and so override CMakeLists.txt's."""
    _, kernels, own = flags()
    names = (f"-DRMSNORM_ISA_{isa.removesuffix('_BF16')}", f"-DRMSNORM_TABLE=kernels_{isa.lower()}")
    arguments = (*kernels, *names, *own[isa], *options)
    return compile_file(directory, "csrc/kernels/kernels.cpp", isa, *arguments, compiler=compiler)


def build(directory, compiler="g++", machine=None, options=(), link=()):
    """The program's path."""
    neon = (machine or host()) == "aarch64"
    isas = ["PORTABLE", "NEON"] if neon else ["PORTABLE", "AVX2", "AVX512", "AVX512_BF16"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        kernels = [pool.submit(compile_kernels, directory, isa, options, compiler) for isa in isas]
        others = [
            pool.submit(compile_file, directory, source, Path(source).stem, *options, compiler=compiler)
            for source in ("csrc/kernels/isa.cpp", "tests/kernels/replay.cpp")
        ]
        objects = [str(future.result()) for future in kernels + others]
    run(compiler, *options, *objects, *link, "-o", str(directory / "replay"))
    return directory / "replay"


def run(*command, **environment):
    process = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    assert process.returncode == 0, f"{' '.join(command)}\n{process.stdout}{process.stderr}"
    return process.stdout


def encode_all(cases):
    return struct.pack("<q", len(cases)) + b"".join(map(encode, cases))


def differences(program, isa, cases, encoded, directory):
    """Runs the cases with an instruction set; the program may be preceded by its emulator. Returns what differs."""
    given, results = directory / "cases", directory / "results"
    given.write_bytes(encoded)
    name = run(*program, str(given), str(results), RMSNORM_ISA=isa).strip()
    assert name == isa
    data, begin, found = results.read_bytes(), 0, []
    for case in cases:
        for index, expected in enumerate(case.expected):
            size = expected.numel() * expected.element_size()
            actual = torch.frombuffer(bytearray(data[begin : begin + size]), dtype=expected.dtype) if size else expected
            begin += size
            if (wrong := difference(actual.reshape(expected.shape), expected)) is not None:
                found.append(f"{case.name}: result {index}: {wrong}")
    assert begin == len(data), f"{len(data) - begin} bytes of results belong to no case"
    return found


def encode(case):
    """A case as replay.cpp reads it: which function, numbers, arrays."""
    if case.op in FORWARDS:
        x, residual, gate, addend, weight, spec = FORWARDS[case.op](*case.arguments)
        rounds = spec.rounding or addend is not None
        normed = reference.result_dtype(x.dtype, weight, spec) if rounds else torch.float32
        types = map(_CODES.get, (case.expected[0].dtype, x_hat_type(x, weight, spec.rounding), normed))
        flags = spec.group_size or x.shape[-1], spec.activation, spec.gate_first, spec.exact_sum
        head = struct.pack("<q3d7q", 0, spec.eps, spec.weight_offset, spec.alpha, *types, *flags)
        return head + b"".join(map(array, (x, residual, gate, addend, weight)))
    if case.op in OTHERS:
        return OTHERS[case.op](case)
    dy, x, gate, rstd, weight, dh, rebuilt, spec = BACKWARDS[case.op](*case.arguments)
    codes = -1 if rebuilt is None else _CODES[rebuilt], 0 if weight is None else _CODES[weight.dtype]
    flags = spec.group_size or x.shape[-1], spec.activation, spec.gate_first
    head = struct.pack("<qd5q", 1, spec.weight_offset, *codes, *flags)
    return head + b"".join(map(array, (dy, x, gate, rstd.reshape(1, -1), weight, dh)))


def modulated(case):
    x, _, scale, shift, *options = case.arguments
    spread = [None if t is None else t.expand(x.shape) for t in (scale, shift)]
    # The operator is given both in one dtype.
    if scale is not None and shift is not None and scale.dtype != shift.dtype:
        spread = [t.float() for t in spread]
    return after(case, NormSpec(*options), (0, 0, 0, 0), (*spread, None, None))


def rotated(case):
    x, _, cos, sin, *options = case.arguments
    angles = [t.expand(*x.shape[:-1], t.shape[-1]) for t in (cos, sin)]
    return after(case, NormSpec(*options[:3]), rotation(cos, *options[3:]), (None, None, *angles))


def after(case, spec, rotation, others):
    x, weight, *_ = case.arguments
    normed = reference.result_dtype(x.dtype, weight, spec) if spec.rounding else torch.float32
    types = map(_CODES.get, (case.expected[0].dtype, x_hat_type(x, weight, spec.rounding), normed))
    head = struct.pack("<q2d7q", 2, spec.eps, spec.weight_offset, *types, *rotation)
    return head + b"".join(map(array, (x, weight, *others)))


def rotation(cos, dim, interleaved, each):
    return dim, cos.shape[-1] != dim, interleaved, each


def rotated_backward(case):
    dy, x, rstd, weight, cos, sin, offset, *options = case.arguments
    angles = [t.expand(*x.shape[:-1], t.shape[-1]) for t in (cos, sin)]
    code = 0 if weight is None else _CODES[weight.dtype]
    head = struct.pack("<qd5q", 3, offset, code, *rotation(cos, *options))
    return head + b"".join(map(array, (dy, x, rstd.reshape(1, -1), weight, *angles)))


def modulated_backward(case):
    dy, x, rstd, weight, scale, offset, rounding, shared, sum_dtype = case.arguments
    code = 0 if weight is None else _CODES[weight.dtype]
    normed = dy.dtype if rounding else torch.float32
    types = map(_CODES.get, (sum_dtype, x_hat_type(x, weight, rounding), normed))
    head = struct.pack("<qd5q", 4, offset, code, *types, math.prod(x.shape[: x.dim() - 1 - shared]))
    spread = None if scale is None else scale.expand(x.shape)
    return head + b"".join(map(array, (dy, x, rstd.reshape(1, -1), weight, spread)))


OTHERS = {
    "modulated": modulated,
    "modulated_backward": modulated_backward,
    "rotated": rotated,
    "rotated_backward": rotated_backward,
}
# From an operator's arguments to x, residual, gate, addend, weight and NormSpec;
# to dy, x, gate, rstd, weight, dh, what x is rebuilt in, and NormSpec.
FORWARDS = {
    "normalize": lambda x, weight, *options: (x, None, None, None, weight, NormSpec(*options)),
    "add": lambda x, residual, weight, *options: (x, residual, None, None, weight, NormSpec(*options)),
    "gated": lambda x, gate, weight, *options: (x, None, gate, None, weight, NormSpec(*options)),
    "norm_add": lambda x, residual, weight, *options: (x, None, None, residual, weight, NormSpec(*options)),
    "residual": lambda x, residual, weight, eps, offset, rounding, size, exact, alpha: (
        *(x, residual, None, None, weight),
        NormSpec(eps, offset, rounding, size, exact_sum=exact, alpha=alpha),
    ),
}
BACKWARDS = {
    "backward": lambda dy, x, rstd, weight, offset, dh: (dy, x, None, rstd, weight, dh, None, NormSpec(0.0, offset)),
    "rebuild": lambda dy, y, rstd, weight, offset, dh, dtype: (
        dy,
        y,
        None,
        rstd,
        weight,
        dh,
        dtype,
        NormSpec(0.0, offset),
    ),
    "gated_backward": lambda dy, x, gate, rstd, weight, dh, offset, *form: (
        *(dy, x, gate, rstd, weight, dh, None),
        NormSpec(0.0, offset, 0, *form),
    ),
}


def array(t):
    """A tensor as rows; those of every other width lie two elements apart."""
    if t is None:
        return struct.pack("<qqqq", -1, 0, 0, 0)
    rows = t.reshape(math.prod(t.shape[:-1]), t.shape[-1])
    gap = 2 * (rows.shape[1] % 2) if rows.shape[0] > 1 else 0
    padded = torch.nn.functional.pad(rows, (0, gap), value=1e9 if t.dtype != torch.float16 else 6e4)
    stored = padded.flatten()[: padded.numel() - gap]
    header = struct.pack("<qqqq", _CODES[t.dtype], *rows.shape, padded.shape[1])
    return header + stored.view(torch.int32 if t.itemsize == 4 else torch.int16).numpy().tobytes()
