"""Times the host's part of a call on a GPU, without a GPU: launches reach Triton's launcher and do nothing.

    python benchmarks/gpu_host.py [--rounds 31] [--output FILE]     what `make gpu-host` does

Tensors on the CPU stand for those on a GPU, and the operators for CUDA are registered for the CPU: all that is between
a Python call and the driver runs as it would. What is missing: the driver's launch, the reading of its arguments in C,
and what PyTorch's allocator for GPUs takes more than the CPU's.
"""

import argparse
import contextlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.driver import CudaLauncher  # noqa: E402

import rmsnorm  # noqa: E402
from rmsnorm.benchmarking.timing import Timing, race  # noqa: E402
from rmsnorm.functional import gated, plain, residual  # noqa: E402
from rmsnorm.gpu import call_cache, launching, registration  # noqa: E402
from rmsnorm.ops import library  # noqa: E402

COLS, DTYPE, EPS = 4096, torch.bfloat16, 1e-6
HOPPER = GPUTarget("cuda", 90, 32)
HEAD = f"""# The host's part of a call on a GPU

Microseconds of a call with one row of {COLS} in bfloat16, without a GPU: `make gpu-host`. Launches do nothing: what the
driver takes for them comes on top. Medians of many rounds, and quartiles. Two launches are of 64 rows, three of 65.

"""


class NoDriver:
    """What Triton asks a driver."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return HOPPER


def without_a_driver(kernel: Any) -> Any:
    """A compiled kernel, whose launcher is Triton's but for the function in C that calls the driver."""
    launcher = object.__new__(CudaLauncher)
    launcher.launch = lambda *arguments: None
    launcher.num_ctas, launcher.launch_cooperative_grid, launcher.launch_pdl = 1, False, False
    launcher.global_scratch_size = launcher.profile_scratch_size = 0
    launcher.global_scratch_align = launcher.profile_scratch_align = 1
    launcher.arg_annotations = launcher.kernel_signature = b""
    kernel._run, kernel.module, kernel.function = launcher, 1, 1
    return kernel


def pretend() -> None:
    """From here on the CPU is a Hopper GPU, with the operators registered for CUDA."""
    triton.runtime.driver.set_active(NoDriver())
    compile_for = launching.compile_for
    launching.compile_for = lambda *arguments: without_a_driver(compile_for(*arguments))
    launching.torch = SimpleNamespace(cuda=SimpleNamespace(device=lambda index: contextlib.nullcontext()))
    launching._current_device = lambda: None  # the index of the CPU
    launching._current_stream = lambda index: 0
    launching._targets[None] = HOPPER
    global registrations  # which keeps them
    registrations = torch.library.Library("rmsnorm", "IMPL")
    with warnings.catch_warnings(action="ignore"):  # that there are operators for the CPU
        registration.register(registrations, "CPU", allow_override=True)
    library.operators.direct = gated.direct = residual.direct = call_cache.fast(library.operators.direct)
    plain._forward = library.operators.direct.forward


Calls = dict[str, Callable[[], Any]]


def inference() -> Calls:
    """Without gradients, and operators."""
    x, residual, weight = torch.randn(1, COLS).to(DTYPE), torch.randn(1, COLS).to(DTYPE), torch.ones(COLS, dtype=DTYPE)
    norm, dispatched = rmsnorm.RMSNorm(COLS, EPS, dtype=DTYPE), torch.ops.rmsnorm
    found: Calls = {
        "`rms_norm`": lambda: rmsnorm.rms_norm(x, weight, EPS),
        "`add_rms_norm`": lambda: rmsnorm.add_rms_norm(x, residual, weight, EPS),
        "`RMSNorm`": lambda: norm(x),
        "`RMSNorm` with a residual": lambda: norm(x, residual),
        "the operator `forward`, by PyTorch's dispatcher": lambda: dispatched.forward.default(x, weight, EPS),
    }
    options = EPS, 0.0, 0, COLS // 2, 0, False
    found |= {
        "the operator `forward`": lambda: library.operators.direct.forward(x, weight, EPS),
        "the operator `gated_forward`": lambda: library.operators.direct.gated_forward(x, residual, weight, *options),
        "the operator `residual_forward`": lambda: library.operators.direct.residual_forward(
            x, residual, weight, EPS, 0.0, 0, 0, True, 1.0
        ),
    }
    for rows, launches in ((1, "one launch"), (64, "two launches"), (65, "three launches")):
        dy, rstd = torch.randn(rows, COLS).to(DTYPE), torch.ones(rows, 1)
        arguments = dy, dy, rstd, weight, 0.0, None, None, True, True
        found[f"the operator `backward`, {launches}"] = lambda a=arguments: library.operators.direct.backward(*a)
    found["the same by PyTorch's dispatcher"] = lambda: dispatched.backward.default(*arguments)
    return found


def training() -> Calls:
    """With gradients, through autograd."""
    norm, x = rmsnorm.RMSNorm(COLS, EPS, dtype=DTYPE), torch.randn(1, COLS).to(DTYPE).requires_grad_()
    y, dy = norm(x), torch.randn(1, COLS).to(DTYPE)
    return {
        "`RMSNorm`, forward of training": lambda: norm(x),
        "its backward, by `torch.autograd.grad`": lambda: torch.autograd.grad(
            y, (x, norm.weight), dy, retain_graph=True
        ),
    }


def table(times: dict[str, Timing]) -> str:
    """As Markdown."""
    lines = ["| call | us | quartiles |", "| --- | --- | --- |"]
    for name, timing in times.items():
        low, median, high = (f"{seconds * 1e6:.1f}" for seconds in (timing.low, timing.median, timing.high))
        lines.append(f"| {name} | {median} | {low} to {high} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    pretend()
    cpu = torch.device("cpu")
    with torch.no_grad():
        times = race(inference(), cpu, arguments.rounds, 1e-3)
    text = HEAD + table(times | race(training(), cpu, arguments.rounds, 1e-3))
    print(text)
    if arguments.output:
        arguments.output.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
