"""Times RMSNorm against what PyTorch offers, interleaved in one process; every result is checked before it is timed.

    python benchmarks/bench.py [--threads 1] [--shapes 8x4096,1024x384] [--dtypes float32,bfloat16]
                               [--what forward,add,training] [--rounds 15] [--json FILE]

`copy` is `out.copy_(x)`, the least that a kernel which reads x and writes y can cost. Figures are medians in
microseconds; the first is the better of ours as a multiple of `copy`.
"""

import argparse
import json
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F

import rmsnorm
from rmsnorm._timing import race

SHAPES = "1x4096,8x4096,1024x384,2048x768,2048x4096,65536x128"
EPS = 1e-6

Contestants = dict[str, Callable[[], object]]


def forward(x: torch.Tensor, weight: torch.Tensor) -> Contestants:
    """y from x; ours also into memory that is there already."""
    shape, out = x.shape[-1:], torch.empty_like(x)
    compiled = torch.compile(lambda x, weight: F.rms_norm(x, shape, weight, EPS), dynamic=False)
    return {
        "F.rms_norm": lambda: F.rms_norm(x, shape, weight, EPS),
        "F.layer_norm": lambda: F.layer_norm(x, shape, weight, None, EPS),
        "torch.compile": lambda: compiled(x, weight),
        "rmsnorm": lambda: rmsnorm.rms_norm(x, weight, EPS),
        "rmsnorm out=": lambda: rmsnorm.rms_norm(x, weight, EPS, out=out),
    }


def add(x: torch.Tensor, weight: torch.Tensor) -> Contestants:
    """Y and h from x and a residual."""
    shape, residual = x.shape[-1:], torch.randn(x.shape).to(x.dtype)

    def separate(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x + residual, shape, weight, EPS)

    compiled = torch.compile(separate, dynamic=False)
    return {
        "F.rms_norm": lambda: separate(x, weight),
        "torch.compile": lambda: compiled(x, weight),
        "rmsnorm": lambda: rmsnorm.add_rms_norm(x, residual, weight, EPS),
    }


def training(x: torch.Tensor, weight: torch.Tensor) -> Contestants:
    """Forward, dx and dweight."""
    dy = torch.randn(x.shape).to(x.dtype)
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    norms = {name: call for name, call in forward(*leaves).items() if name != "rmsnorm out="}
    return {name: lambda call=call: torch.autograd.grad(call(), leaves, dy) for name, call in norms.items()}


CONTESTS = {"forward": forward, "add": add, "training": training}


def is_right(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> bool:
    """Within the roundings of a plain float32 implementation, of float64."""
    wide = x.double()
    want = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double()
    # Six roundings in float32 (a long float32 sum counts for three), and one of the result.
    return bool(((y - want).abs() <= (6 * 2.0**-24 + torch.finfo(y.dtype).eps) * want.abs()).all())


def main() -> int:
    """Prints a line for each shape and dtype, and writes them as JSON lines on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--what", default="forward,add,training")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    if unknown := set(arguments.what.split(",")) - set(CONTESTS):
        parser.error(f"--what takes {', '.join(CONTESTS)}, got {', '.join(sorted(unknown))}")
    torch.set_num_threads(arguments.threads)
    lines = []
    for what in arguments.what.split(","):
        for dtype in (getattr(torch, name) for name in arguments.dtypes.split(",")):
            for shape in (tuple(map(int, text.split("x"))) for text in arguments.shapes.split(",")):
                torch.manual_seed(0)
                torch._dynamo.reset()
                x, weight = torch.randn(shape).to(dtype), (1 + 0.2 * torch.randn(shape[-1])).to(dtype)
                for name, call in forward(x, weight).items():
                    if name != "F.layer_norm" and not is_right(x, weight, call()):
                        print(f"{name} is wrong at {shape} {dtype}: not timed", file=sys.stderr)
                        return 1
                target = torch.empty_like(x)
                contestants = {"copy": lambda target=target, x=x: target.copy_(x), **CONTESTS[what](x, weight)}
                times = {name: t.median * 1e6 for name, t in race(contestants, x.device, arguments.rounds).items()}
                label = f"{what:9}{'x'.join(map(str, shape)):>11} {str(dtype).removeprefix('torch.'):9}"
                ratio = min(t for name, t in times.items() if name.startswith("rmsnorm")) / times["copy"]
                print(label, f"{ratio:6.2f} x copy  ", "  ".join(f"{n} {t:.1f}" for n, t in times.items()), flush=True)
                lines.append(
                    {"what": what, "shape": shape, "dtype": str(dtype), "threads": arguments.threads, "us": times}
                )
    if arguments.json:
        with open(arguments.json, "w") as file:  # noqa: PTH123
            file.writelines(json.dumps(line) + "\n" for line in lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
