"""Versions, kernels, instruction sets and threads: what to paste into a bug report."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import rmsnorm
from rmsnorm.cli.text import printable
from rmsnorm.gpu import availability
from rmsnorm.ops import fallback, library

# The optional extras that commands need.
EXTRAS = ("bench", "demo")
# What changes results' speed or the choice of kernels without a word.
VARIABLES = ("RMSNORM_", "OMP_", "GOMP_", "KMP_", "MKL_NUM", "ATEN_", "CUDA_VISIBLE", "HIP_VISIBLE", "LD_PRELOAD")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    facts = collect()
    print(json.dumps(facts, indent=2) if arguments.json else format_facts(facts))
    return 0


def collect() -> dict[str, Any]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return {
        "rmsnorm": rmsnorm.__version__,
        "torch": torch.__version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
        "processor": processor(),
        "kernels": asdict(library.status()),
        "gpu_kernels": {
            "missing": availability.missing() or availability.too_old(),
            "triton": availability.triton_version(),
        },
        "accelerator": f"{accelerator.type} ({torch.get_device_module(accelerator).get_device_name()})"
        if accelerator
        else None,
        "float64": accelerator is None or fallback.has_float64(accelerator),
        "threads": torch.get_num_threads(),
        "cores": usable_cores(),
        "extras": {extra: {package: version(package) for package in packages_of(extra)} for extra in EXTRAS},
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
    }


def processor() -> str:
    """Return the processor's own name for itself where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def usable_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def packages_of(extra: str) -> list[str]:
    """Return what an optional extra of this package installs, as its metadata has it."""
    declared = importlib.metadata.requires("rmsnorm") or []
    lines = (line for line in declared if re.search(rf"""extra == ['"]{extra}['"]""", line))
    names = (re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines)
    return [name for name in names if name != "rmsnorm"]


def version(package: str) -> str | None:
    """Return an installed package's version, None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def format_facts(facts: dict[str, Any]) -> str:
    kernels, environment = facts["kernels"], facts["environment"]
    lines = [(name, str(facts[name])) for name in ("rmsnorm", "torch", "python", "platform", "processor")]
    if kernels["compiled"]:
        chosen = "by RMSNORM_ISA" if environment.get("RMSNORM_ISA") else "by this processor"
        lines.append(("CPU kernels", "compiled"))
        lines.append(("instructions", f"{kernels['isa']}, chosen {chosen} from {', '.join(kernels['isas'])}"))
    else:
        lines.append(("CPU kernels", f"not compiled: {kernels['reason']}"))
        lines.append(("", "Results are the same to the bit, by plain PyTorch, and slower."))
    missing, triton = facts["gpu_kernels"].values()
    lines.append(("GPU kernels", f"Triton {triton}" if missing is None else f"none: {missing}"))
    lines.append(("accelerator", facts["accelerator"] or "torch sees none"))
    if not facts["float64"]:
        lines.append(("", "It has no float64: norms run on the CPU and are copied there and back, with the same bits."))
    lines.append(("threads", f"{facts['threads']}, on {facts['cores']} cores that this process may use"))
    for extra, packages in facts["extras"].items():
        found = ", ".join(f"{name} {number or 'missing'}" for name, number in packages.items())
        hint = "" if all(packages.values()) else f'; try: pip install "rmsnorm[{extra}]"'
        lines.append((f"for {extra}", found + hint))
    lines += [("environment" if i == 0 else "", f"{k}={v}") for i, (k, v) in enumerate(environment.items())]
    return "\n".join(f"{name:<14}{printable(value, 1000)}".rstrip() for name, value in lines)
