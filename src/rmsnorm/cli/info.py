"""Versions, kernels, instruction sets and threads: what to paste into a bug report."""

import argparse
import json
import os
import platform
from dataclasses import asdict
from typing import Any

import torch

import rmsnorm
from rmsnorm import _ops, gpu


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    facts = collect()
    print(json.dumps(facts, indent=2) if arguments.json else format_facts(facts))
    return 0


def collect() -> dict[str, Any]:
    status = asdict(_ops.status())
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return {
        "rmsnorm": rmsnorm.__version__,
        "torch": torch.__version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
        "kernels": status,
        "gpu_kernels": {"missing": gpu.missing(), "triton": gpu.triton_version()},
        "RMSNORM_ISA": os.environ.get("RMSNORM_ISA"),
        "threads": torch.get_num_threads(),
        "accelerator": f"{accelerator.type} ({torch.get_device_module(accelerator).get_device_name()})"
        if accelerator
        else None,
    }


def format_facts(facts: dict[str, Any]) -> str:
    kernels = facts["kernels"]
    lines = {name: str(facts[name]) for name in ("rmsnorm", "torch", "python", "platform")}
    if kernels["compiled"]:
        chosen = "by RMSNORM_ISA" if facts["RMSNORM_ISA"] else "by this processor"
        lines["kernels"] = "compiled"
        lines["instructions"] = f"{kernels['isa']}, chosen {chosen} from {', '.join(kernels['isas'])}"
    else:
        lines["kernels"] = f"not compiled: {kernels['reason']}"
        lines[""] = "Results are the same to the bit, by plain PyTorch, and slower."
    without = facts["gpu_kernels"]["missing"]
    lines["gpu kernels"] = f"Triton {facts['gpu_kernels']['triton']}" if without is None else f"none: {without}"
    lines["threads"] = str(facts["threads"])
    lines["accelerator"] = facts["accelerator"] or "none"
    return "\n".join(f"{name:<14}{value}" for name, value in lines.items())
