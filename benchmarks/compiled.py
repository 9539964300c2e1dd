"""Times the ways in which `torch.compile` can take `silu(norm(x + residual))`, interleaved in one process.

    python benchmarks/compiled.py [--threads 1] [--shapes 1x576,64x4096,1024x4096] [--dtypes float32,bfloat16]
                                  [--what forward,training] [--rounds 9] [--json FILE]

`kernels` and `formula` are what `rmsnorm.compile_as` chooses between; `reference` is the definition, traced: it differs
from both. `eager` is not compiled. Figures are medians in microseconds.
"""

import argparse
import json
import sys
from collections.abc import Callable

import torch

import rmsnorm
from rmsnorm.benchmarking.timing import race
from rmsnorm.numerics import reference
from rmsnorm.spec import NormSpec

SHAPES = "1x576,64x4096,1024x4096"
EPS = 1e-5


def block(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What stands around a norm in a model: the residual stream before it, an activation after it."""
    y, h = rmsnorm.add_rms_norm(x, residual, weight, EPS)
    return torch.nn.functional.silu(y), h


def traced(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same on the reference, in operations that the compiler sees."""
    y, h, _ = reference.add_forward(x, residual, weight, NormSpec(EPS))
    return torch.nn.functional.silu(y), h


def compiled(way: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The block as it is compiled `way`; compiled when it is first called, which must be before the next `way`."""
    rmsnorm.compile_as(way)
    return torch.compile(lambda *tensors: block(*tensors), fullgraph=True, dynamic=False)


def contestants(what: str, tensors: list[torch.Tensor]) -> dict[str, Callable[[], object]]:
    """By name, each called once."""
    incoming = torch.randn(tensors[0].shape).to(tensors[0].dtype)
    leaves = [t.clone().requires_grad_(what == "training") for t in tensors]
    found = {}
    for name in ("eager", "kernels", "formula", "reference"):
        if name == "eager":
            function = block
        elif name == "reference":
            function = torch.compile(traced, fullgraph=True, dynamic=False)
        else:
            function = compiled(name)
        if what == "forward":
            found[name] = lambda function=function: function(*leaves)
        elif name != "reference":  # it has no derivative
            found[name] = lambda function=function: torch.autograd.grad(function(*leaves), leaves, [incoming] * 2)
        else:
            continue
        found[name]()
    return found


def main() -> int:
    """Prints a line for each shape and dtype, and writes them as JSON lines on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--what", default="forward,training")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    lines = []
    for what in arguments.what.split(","):
        for dtype in (getattr(torch, name) for name in arguments.dtypes.split(",")):
            for shape in (tuple(map(int, text.split("x"))) for text in arguments.shapes.split(",")):
                torch.manual_seed(0)
                torch._dynamo.reset()
                x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
                calls = contestants(what, [x, residual, (1 + 0.2 * torch.randn(shape[-1])).to(dtype)])
                times = {name: t.median * 1e6 for name, t in race(calls, x.device, arguments.rounds).items()}
                label = f"{what:9}{'x'.join(map(str, shape)):>11} {str(dtype).removeprefix('torch.'):9}"
                print(label, "  ".join(f"{name} {t:.1f}" for name, t in times.items()), flush=True)
                lines.append(
                    {"what": what, "shape": shape, "dtype": str(dtype), "threads": arguments.threads, "us": times}
                )
    if arguments.json:
        with open(arguments.json, "w") as file:  # noqa: PTH123
            file.writelines(json.dumps(line) + "\n" for line in lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
