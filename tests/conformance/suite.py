"""Taking a norm through the suite."""

import torch

from rmsnorm import conformance
from rmsnorm.conformance import CHECKS
from rmsnorm.conformance.calling import understand
from rmsnorm.conformance.outcome import FAIL

# torch.compile takes seconds: it has tests of its own.
SCORED = tuple(c for c in CHECKS if not c.extra and c.name != "compile")
CPU = torch.device("cpu")


def results(target, checks=SCORED, **options):
    implementation = target if isinstance(target, conformance.Implementation) else understand(target, "it")
    return {r.name: r for r in conformance.run(implementation, checks, device=CPU, **options)}


def failing(found):
    return {name for name, result in found.items() if result.verdict == FAIL}


NORM = """
def {name}(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps).to(x.dtype) * weight
"""
