"""Times the gated norms against what models run: those of Qwen3-Next and Mamba 2 in transformers.

    python benchmarks/gated.py [--threads 1] [--rounds 9] [--json FILE]

`copy` moves the bytes that a gated forward must: half of x, gate and y together, into memory that is there already;
`fresh copy` into new memory, which all other results are too. Figures are medians in microseconds.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F

from rmsnorm import gated_rms_norm
from rmsnorm.benchmarking.timing import race

SHAPES = ((64, 4096), (2048, 4096), (16384, 128))
EPS = 1e-6


def qwen3_next(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`Qwen3NextRMSNormGated.forward` of transformers 5."""
    y = x.to(torch.float32)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)
    y = weight * y.to(x.dtype)
    return (y * F.silu(gate.to(torch.float32))).to(x.dtype)


def mamba2(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`MambaRMSNormGated.forward` of transformers 5."""
    u = x.to(torch.float32) * F.silu(gate.to(torch.float32))
    u = u * torch.rsqrt(u.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * u.to(x.dtype)


def ours(norm_before_gate: bool):
    """The call that computes the same."""
    options = {"norm_before_gate": norm_before_gate, "rounding": "before_scale"}
    return lambda x, gate, weight: gated_rms_norm(x, gate, weight, EPS, **options)


FUNCTIONS = {
    "rmsnorm, qwen3_next": ours(True),
    "qwen3_next": qwen3_next,
    "rmsnorm, mamba2": ours(False),
    "mamba2": mamba2,
}


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
                weight = (1 + 0.2 * torch.randn(shape[1])).to(dtype)
                source = torch.randn(shape[0] * 3 // 2, shape[1]).to(dtype)
                target = torch.empty_like(source)
                contestants = {
                    "copy": lambda source=source, target=target: target.copy_(source),
                    "fresh copy": source.clone,
                }
                given = (x, gate, weight)
                if what == "training":
                    given = tuple(t.requires_grad_() for t in given)
                for name, f in FUNCTIONS.items():
                    if what == "training":
                        contestants[name] = lambda f=f, given=given, dy=dy: torch.autograd.grad(f(*given), given, dy)
                    else:
                        contestants[name] = lambda f=f, given=given: f(*given)
                times = {n: t.median * 1e6 for n, t in race(contestants, x.device, arguments.rounds).items()}
                label = f"{what:9}{'x'.join(map(str, shape)):>11} {str(dtype).removeprefix('torch.'):9}"
                print(label, "  ".join(f"{n} {t:.0f}" for n, t in times.items()), flush=True)
                lines.append(
                    {"what": what, "shape": shape, "dtype": str(dtype), "threads": arguments.threads, "us": times}
                )
    if arguments.json:
        arguments.json.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
