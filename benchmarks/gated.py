"""Times the gated norms against what models run: those of Qwen3-Next and Mamba 2 in transformers.

    python benchmarks/gated.py [--threads 1] [--rounds 9] [--json FILE]

`copy` moves the bytes that a gated forward must: half of x, gate and y together, into memory that is there already;
`fresh copy` into new memory, which all other results are too. Figures are medians in microseconds.
"""

import argparse
import json
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
from torch import nn

from rmsnorm import GatedRMSNorm
from rmsnorm.benchmarking.timing import race

SHAPES = ((64, 4096), (2048, 4096), (16384, 128))
EPS = 1e-6
CLASSES = {"qwen3_next": "Qwen3NextRMSNormGated", "mamba2": "MambaRMSNormGated"}


def theirs(model: str, name: str, width: int, dtype: torch.dtype) -> nn.Module:
    """A norm of transformers, with a weight that is not all ones."""
    cls = getattr(import_module(f"transformers.models.{model}.modeling_{model}"), name)
    groups = {"group_size": width} if model == "mamba2" else {}
    norm: nn.Module = cls(width, eps=EPS, **groups)
    nn.init.normal_(norm.weight, 1.0, 0.2)
    return norm.to(dtype)


def norms(width: int, dtype: torch.dtype) -> dict[str, nn.Module]:
    """Each norm of transformers, and ours in its place with the same parameter."""
    both: dict[str, nn.Module] = {}
    for model, name in CLASSES.items():
        norm = theirs(model, name, width, dtype)
        both |= {f"rmsnorm, {model}": GatedRMSNorm.from_module(norm), model: norm}
    return both


def gradients(norm: nn.Module, leaves: tuple[torch.Tensor, ...], dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A forward and a backward pass; the leaves are x, the gate and the weight."""
    return torch.autograd.grad(norm(*leaves[:2]), leaves, dy)


def main() -> None:
    """Prints a line for each shape, dtype and pass, and writes them as JSON lines on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    lines = []
    for what in ("forward", "training"):
        for dtype in (torch.float32, torch.bfloat16):
            for shape in SHAPES:
                x, gate, dy = (torch.randn(shape).to(dtype) for _ in range(3))
                source = torch.randn(shape[0] * 3 // 2, shape[1]).to(dtype)
                target = torch.empty_like(source)
                calls = {
                    "copy": lambda source=source, target=target: target.copy_(source),
                    "fresh copy": source.clone,
                }
                for name, norm in norms(shape[1], dtype).items():
                    if what == "training":
                        leaves = (x.requires_grad_(), gate.requires_grad_(), norm.weight)
                        calls[name] = partial(gradients, norm, leaves, dy)
                    else:
                        calls[name] = partial(norm.requires_grad_(False), x, gate)
                times = {n: t.median * 1e6 for n, t in race(calls, x.device, arguments.rounds).items()}
                label = f"{what:9}{'x'.join(map(str, shape)):>11} {str(dtype).removeprefix('torch.'):9}"
                print(label, "  ".join(f"{n} {t:.0f}" for n, t in times.items()), flush=True)
                lines.append(
                    {"what": what, "shape": shape, "dtype": str(dtype), "threads": arguments.threads, "us": times}
                )
    if arguments.json:
        arguments.json.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
