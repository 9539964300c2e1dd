"""The speed half of gpu_check.py: microseconds, shares of what a copy reaches, and time on the host for each call."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import rmsnorm

SHAPES = (
    *((rows, 4096) for rows in (1, 4, 16, 64, 4096, 16384)),
    *((8192, 8192), (4096, 16384), (262_144, 128)),
)
DTYPES = (torch.bfloat16, torch.float32)
# Each takes seconds to compile.
COMPILED, COMPILED_SHAPES = "torch.compile", ((1, 4096), (4096, 4096), (8192, 8192), (262_144, 128))
WHAT = ("forward", "add", "backward")
EPS = 1e-6
# Inputs are rotated through more memory than any last cache holds.
ROTATED_BYTES = 240 << 20
LAUNCHES, SAMPLES = 20, 15

Contestants = dict[str, Callable[[Tensor, Tensor, Tensor], Any]]


def contestants(what: str, dry: bool) -> Contestants:
    """By name: a function of x, weight and a second tensor of x's shape (the residual, or dy)."""

    def stock(x: Tensor, weight: Tensor, other: Tensor) -> Any:
        return F.rms_norm(x + other if what == "add" else x, x.shape[-1:], weight, EPS)

    def ours(x: Tensor, weight: Tensor, other: Tensor) -> Any:
        return rmsnorm.add_rms_norm(x, other, weight, EPS) if what == "add" else rmsnorm.rms_norm(x, weight, EPS)

    found: Contestants = {"rmsnorm": ours, "F.rms_norm": stock}
    if not dry:
        found[COMPILED] = torch.compile(stock, dynamic=False)
    found |= _liger(what) | _quack(what)
    return found


def _liger(what: str) -> Contestants:
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction as Plain
    except ImportError:
        return {}
    if what == "add":
        try:
            from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction as Fused
        except ImportError:
            return {}
        return {"liger": lambda x, weight, other: Fused.apply(x, other, weight, EPS, 0.0, "llama", False)}
    return {"liger": lambda x, weight, other: Plain.apply(x, weight, EPS, 0.0, "llama", False)}


def _quack(what: str) -> Contestants:
    try:
        from quack import rmsnorm as quack
    except ImportError:
        return {}
    if what == "add":
        return {"quack": lambda x, weight, other: quack(x, weight, residual=other, eps=EPS)}
    return {"quack": lambda x, weight, other: quack(x, weight, eps=EPS)}


def backward_of(
    norm: Callable[[Tensor, Tensor, Tensor], Any], x: Tensor, weight: Tensor, dy: Tensor
) -> Callable[[], Any]:
    """dx and dweight alone: the graph of one forward, differentiated again and again."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = norm(x, weight, dy)
    return lambda: torch.autograd.grad(y, (x, weight), dy, retain_graph=True)


def moved_bytes(what: str, x: Tensor) -> int:
    """The least that must be read and written."""
    return x.nbytes * {"forward": 2, "add": 4, "backward": 3}[what]


def measure(report: Any, device: torch.device, dry: bool, until: float) -> None:
    """A line for each shape, dtype, operation and contestant, as far as the time goes.

    All on one stream of our own: a graph can capture a backward only if its forward ran on the stream that is captured.
    """
    with contextlib.nullcontext() if dry else torch.cuda.stream(torch.cuda.Stream(device)):
        _measure(report, device, dry, until)


def _measure(report: Any, device: torch.device, dry: bool, until: float) -> None:
    shapes = ((2, 64), (3, 130)) if dry else SHAPES
    copies: dict[int, float] = {}
    host(report, device, dry)
    for what in WHAT:
        norms = contestants(what, dry)
        for (rows, cols), dtype in ((shape, dtype) for shape in shapes for dtype in DTYPES):
            if report.past(until):
                report.line("speed", skipped=f"from {what} {rows} x {cols} {dtype} on, for lack of time")
                return
            x = torch.randn(rows, cols, device=device).to(dtype)
            size = moved_bytes(what, x)
            if size not in copies:
                copies[size] = copy_seconds(size, device, dry)
                report.line(
                    "copy", bytes=size, us=round(copies[size] * 1e6, 2), gb_per_s=round(size / copies[size] / 1e9)
                )
            for name, norm in norms.items():
                if name == COMPILED:
                    if dtype != torch.bfloat16 or (rows, cols) not in COMPILED_SHAPES:
                        continue
                    torch._dynamo.reset()  # which gives up after some shapes, and runs them uncompiled
                try:
                    seconds = norm_seconds(what, norm, x, device, dry)
                except Exception as error:  # a peer that fails is a result too
                    report.line(
                        "speed", what=what, rows=rows, cols=cols, dtype=str(dtype), name=name, error=str(error)[:300]
                    )
                    continue
                report.line(
                    *("speed",),
                    what=what,
                    rows=rows,
                    cols=cols,
                    dtype=str(dtype).removeprefix("torch."),
                    name=name,
                    us=[round(s * 1e6, 2) for s in seconds],
                    share_of_copy=round(copies[size] / seconds[1], 3),
                )


def norm_seconds(what: str, norm: Any, x: Tensor, device: torch.device, dry: bool) -> tuple[float, float, float]:
    """Quartiles of one call's time, the median in the middle."""
    copies = 1 if dry else max(1, min(LAUNCHES, ROTATED_BYTES // (2 * x.nbytes)))
    inputs = [(x.clone(), torch.randn_like(x)) for _ in range(copies)]
    weight = torch.ones(x.shape[-1], device=device, dtype=x.dtype)
    if what == "backward":
        calls = [backward_of(norm, a, weight, b) for a, b in inputs]
    else:
        calls = [lambda a=a, b=b: norm(a, weight, b) for a, b in inputs]
    with torch.set_grad_enabled(what == "backward"):
        return quartiles(calls, device, dry)


def copy_seconds(size: int, device: torch.device, dry: bool) -> float:
    """A copy that reads and writes `size` bytes together."""
    copies = 1 if dry else max(1, min(LAUNCHES, ROTATED_BYTES // size))
    pairs = [torch.empty(2, size // 2, dtype=torch.uint8, device=device) for _ in range(copies)]
    return quartiles([lambda p=p: p[1].copy_(p[0]) for p in pairs], device, dry)[1]


def quartiles(calls: list[Callable[[], Any]], device: torch.device, dry: bool) -> tuple[float, float, float]:
    """Seconds for each call, from a graph of LAUNCHES of them: launches cost nothing there."""
    launches = [calls[i % len(calls)] for i in range(2 if dry else LAUNCHES)]
    if dry:
        samples = []
        for call in launches:
            begin = time.perf_counter()
            call()
            samples.append(time.perf_counter() - begin)
    else:
        samples = _graph_samples(launches, device)
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, median, high


def _graph_samples(launches: list[Callable[[], Any]], device: torch.device) -> list[float]:
    for call in launches[:3]:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(device)):
        for call in launches:
            call()
    samples = []
    for _ in range(SAMPLES + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) / 1e3 / len(launches))
    return samples[1:]


def host(report: Any, device: torch.device, dry: bool) -> None:
    """Microseconds until a call returns, the device being idle: what a small model waits for."""
    x = torch.randn(1, 64 if dry else 4096, device=device).bfloat16()
    weight, other = torch.ones_like(x[0]), torch.randn_like(x)
    for what in WHAT:
        for name, norm in contestants(what, dry).items():
            try:
                with torch.set_grad_enabled(what == "backward"):
                    call = (
                        (lambda norm=norm: norm(x, weight, other))
                        if what != "backward"
                        else backward_of(norm, x, weight, other)
                    )
                    samples = [_host_sample(call, 2 if dry else 100, device) for _ in range(2 if dry else SAMPLES)]
            except Exception as error:  # a peer that fails is a result too
                report.line("host", what=what, name=name, error=str(error)[:300])
                continue
            report.line("host", what=what, name=name, us=round(statistics.median(samples) * 1e6, 2))


def _host_sample(call: Callable[[], Any], times: int, device: torch.device) -> float:
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(times):
        call()
    seconds = (time.perf_counter() - begin) / times
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return seconds
