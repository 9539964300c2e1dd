"""What the library is made of: nothing that instruction sets share, nothing of the machine it was built on."""

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rmsnorm.ops import library
from tests.kernels import replay

NAMES = {"x86_64": ("AVX512_BF16", "AVX512", "AVX2", "PORTABLE"), "aarch64": ("NEON", "PORTABLE")}[replay.host()]
# What a compiler may call of its own accord, and the rounding mode where there is no register for it.
ALLOWED = {"memcpy", "memset", "memmove", "fegetround", "fesetround", "_GLOBAL_OFFSET_TABLE_"}


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """Each instruction set's object file, compiled as the library's, except that nothing is inlined."""
    assert shutil.which("g++"), "g++ not found: apt-get install g++"
    directory = tmp_path_factory.mktemp("objects")
    return {isa: replay.compile_kernels(directory, isa, options=["-O0", "-fPIC"]) for isa in NAMES}


def symbols(path):
    """(name, letter of nm) of all that is not local to the file; mangled, so that an overload is one of its own."""
    lines = replay.run("nm", "--extern-only", "--format=posix", str(path)).splitlines()
    return [tuple(line.split()[:2]) for line in lines]


def test_kernels_share_no_function_with_other_instruction_sets(objects):
    """A weak function, as every inline one with a name is, would be merged by the linker.

    It would keep one copy, perhaps the one compiled for AVX-512, and call it on machines that have none.
    """
    for isa, path in objects.items():
        defined = {name for name, kind in symbols(path) if kind != "U"}
        assert defined == {f"_ZN7rmsnorm{len('kernels_' + isa)}kernels_{isa.lower()}E"}, isa


def test_kernels_call_nothing_but_memory_functions(objects):
    """No allocation, no exceptions, no mathematics library, whose results differ between machines."""
    for isa, path in objects.items():
        assert {name for name, kind in symbols(path) if kind == "U"} <= ALLOWED, isa


def test_kernels_contract_nothing_and_know_no_fast_mathematics():
    """These flags keep the bits; fma_down is the one place that fuses, and says so itself."""
    everywhere, kernels, own = replay.flags()
    assert {"-ffp-contract=off", "-fno-fast-math", "-frounding-math"} <= set(everywhere)
    given = {*everywhere, *kernels, *(flag for flags in own.values() for flag in flags)}
    assert not [flag for flag in given if "native" in flag or flag in ("-ffast-math", "-Ofast", "-mrecip")]


def test_every_instruction_set_of_this_machine_is_offered_best_first():
    flags = set()
    if Path("/proc/cpuinfo").exists():
        found = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        flags = set(found[1].split()) if found else set()
    avx2 = {"avx2", "fma", "f16c"} <= flags
    avx512 = avx2 and {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags
    expected = {
        "avx512_bf16": avx512 and "avx512_bf16" in flags,
        "avx512": avx512,
        "avx2": avx2,
        "neon": platform.machine() in ("aarch64", "arm64"),
        "portable": True,
    }
    assert library.status().compiled, library.status().reason
    assert library.status().isas == [isa for isa, present in expected.items() if present]
    assert library.status().isa == os.environ.get("RMSNORM_ISA", library.status().isas[0])


# ---------------------------------------------------------------- the library


@pytest.fixture(scope="module")
def built():
    return Path(importlib.util.find_spec("rmsnorm._C").origin)


def test_the_library_names_no_path_of_the_machine_it_was_built_on(built):
    """Neither where sources and headers were, nor where torch was: a wheel is for other machines."""
    torch_directory = str(Path(importlib.util.find_spec("torch").origin).parent)
    content = built.read_bytes()
    for path in (str(replay.ROOT), torch_directory, str(Path.home()), sys.prefix, "/tmp/"):  # noqa: S108
        assert path.encode() not in content, path


def test_the_library_needs_torch_and_the_runtime_of_the_compiler_alone(built):
    """Above all no OpenMP: two of its runtimes in one process hang or oversubscribe."""
    found = replay.run("readelf", "--dynamic", "--wide", str(built))
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", found))
    allowed = (
        "libtorch_cpu.so",
        "libstdc++.so",
        "libgcc_s.so",
        "libc.so",
        "libm.so",
        "ld-linux",
        "libasan",
        "libubsan",
    )
    assert not [name for name in needed if not name.startswith(allowed)], needed
    assert "RPATH" not in found
    assert "RUNPATH" not in found


def test_the_library_exports_nothing_that_could_meet_another_library(built):
    """Kernels, tables and operators are hidden: the operators are registered, not called by name."""
    lines = replay.run("nm", "--dynamic", "--defined-only", "--demangle", str(built)).splitlines()
    assert not [line for line in lines if re.search(r"\brmsnorm::|kernels_", line)]


# ---------------------------------------------------------------- without it

COMPARE = """
import importlib.util, sys, torch
if sys.argv[1] == "without":
    find_spec = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *rest: None if name == "rmsnorm._C" else find_spec(name, *rest)
import rmsnorm
from rmsnorm.ops import library
torch.manual_seed(0)
results = []
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    norm = rmsnorm.RMSNorm(100, dtype=dtype)
    x = torch.randn(50, 100).to(dtype).requires_grad_()
    y, h = norm(x, torch.randn(50, 100).to(dtype))
    (y.float().sum() + h.float().square().sum()).backward()
    results += [y.detach(), h.detach(), x.grad, norm.weight.grad]
torch.save({"results": results, "compiled": library.status().compiled, "reason": library.status().reason}, sys.argv[2])
"""


def test_without_the_library_the_bits_are_the_same_and_the_reason_is_known(tmp_path, assert_bits_equal):
    import torch

    found = {}
    for how in ("with", "without"):
        path = tmp_path / how
        subprocess.run(
            [sys.executable, "-W", "error", "-W", "ignore:rmsnorm has no compiled", "-c", COMPARE, how, str(path)],
            check=True,
        )
        found[how] = torch.load(path)
    assert found["with"]["compiled"]
    assert not found["without"]["compiled"]
    assert "no C++ compiler was found" in found["without"]["reason"]
    for a, b in zip(found["with"]["results"], found["without"]["results"], strict=True):
        assert_bits_equal(b, a)
