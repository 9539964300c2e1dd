"""RMSNorm beside LayerNorm: outputs, operations, bytes and measured time."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F

from rmsnorm.benchmarking.comparison import NormalizationComparison, compare_normalization
from rmsnorm.benchmarking.timing import Timing
from rmsnorm.cli.progress import progress
from rmsnorm.cli.requirements import DTYPES, device, file_of, positive, require, require_writable, shape, writing
from rmsnorm.functional import rms_norm

ORANGE, BLUE, GREEN, GREY = "#e8590c", "#1c7ed6", "#2f9e44", "#7a828c"
COLORS = {"rmsnorm.rms_norm": ORANGE, "F.rms_norm": BLUE, "F.layer_norm": GREEN, "copy": GREY}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", type=shape, default=(1024, 4096), metavar="ROWSxCOLS", help="default 1024x4096")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default float32")
    parser.add_argument("--mean", type=float, default=0.0, help="of the random input, whose deviation is 1 (default 0)")
    parser.add_argument("--device", type=device, default="cpu", help="default cpu")
    parser.add_argument("--rounds", type=positive, default=15, help="rounds of timing (default 15)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    picture = file_of(".svg", ".png")
    parser.add_argument("--plot", type=picture, metavar="FILE", help=".svg or .png: what the mean does, and the times")


def run(arguments: argparse.Namespace) -> int:
    if arguments.plot:
        require("bench", "matplotlib")
        require_writable(arguments.plot)
    rows, dim = arguments.shape
    dtype = getattr(torch, arguments.dtype)
    with progress(2 * arguments.rounds) as step:
        step(f"{rows}x{dim} {arguments.dtype}", 0.0)
        found = compare_normalization(
            dim,
            rows,
            dtype,
            mean=arguments.mean,
            device=arguments.device,
            rounds=arguments.rounds,
            each_round=step,
        )
    print(json.dumps(asdict(found), indent=2) if arguments.json else found)
    if arguments.plot:
        with writing(arguments.plot):
            draw(found, arguments.mean, arguments.plot)
    return 0


def draw(found: NormalizationComparison, mean: float, path: Path) -> None:
    """Write a picture: how far the outputs part as the mean of the input grows, and what each costs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.2, 1, 1))
    means, apart = mean_effect(found.shape[1], max(3.0, abs(mean)))
    left.plot(means, apart, color=ORANGE, linewidth=2)
    left.axvline(abs(mean), color=GREY, linestyle="--", linewidth=1)
    left.annotate(
        "yours", (abs(mean), 1), xycoords=("data", "axes fraction"), xytext=(4, -12), textcoords="offset points"
    )
    left.set(xlabel="mean of the input (its deviation is 1)", ylabel="mean |RMSNorm - LayerNorm|", ylim=(0, None))
    left.set_title("The outputs differ by what the mean does", fontsize=10)
    _bars(middle, "forward", found.times)
    _bars(right, "backward", found.backward_times)
    figure.suptitle(f"{found.shape[0]} x {found.shape[1]}, {found.dtype}, {found.device}", fontsize=11)
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)


def mean_effect(dim: int, largest: float) -> tuple[list[float], list[float]]:
    """Return means of inputs of that width, and how far apart the outputs are for each."""
    centred = torch.randn(32, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    means = torch.linspace(0, largest, 25).tolist()
    return means, [(rms_norm(x) - F.layer_norm(x, (dim,))).abs().mean().item() for x in (centred + m for m in means)]


def _bars(axes: object, title: str, times: dict[str, Timing]) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)  # noqa: S101 - for the type checker
    names = list(times)[::-1]
    longest = max(t.high for t in times.values())
    unit, size = next(((u, s) for u, s in (("s", 1.0), ("ms", 1e-3)) if longest >= s), ("us", 1e-6))
    medians = [times[name].median / size for name in names]
    low = [(times[name].median - times[name].low) / size for name in names]
    high = [(times[name].high - times[name].median) / size for name in names]
    bars = axes.barh(names, medians, xerr=[low, high], color=[COLORS[name] for name in names], ecolor=GREY)
    axes.bar_label(bars, fmt="%.3g", padding=4, fontsize=8)
    axes.set(xlabel=unit, xlim=(0, 1.2 * longest / size))
    axes.set_title(f"Time of one call, {title}", fontsize=10)
    axes.tick_params(labelsize=8)
