"""A block with a residual stream, written with fused calls, has the bits of the same block written apart.

python examples/residual_block.py
"""

import torch
from torch import Tensor, nn

import rmsnorm


def apart(blocks: nn.ModuleList, norms: nn.ModuleList, stream: Tensor) -> Tensor:
    """Norm, branch, addition: three passes over the stream for each block."""
    for block, norm in zip(blocks, norms, strict=False):
        stream = stream + block(norm(stream))
    return norms[-1](stream)


def fused(blocks: nn.ModuleList, norms: nn.ModuleList, stream: Tensor) -> Tensor:
    """The addition and the next block's norm are one pass."""
    y = norms[0](stream)
    for block, norm in zip(blocks, norms[1:], strict=True):
        y, stream = norm(block(y), stream)
    return y


def main() -> None:
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4))
    norms = nn.ModuleList(rmsnorm.RMSNorm(64) for _ in range(5))
    for dtype in (torch.float32, torch.bfloat16):
        blocks.to(dtype), norms.to(dtype)
        results = []
        for forward in (apart, fused):
            blocks.zero_grad(), norms.zero_grad()
            stream = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
            y = forward(blocks, norms, stream)
            y.sum().backward()
            results.append([y, *(p.grad for p in norms.parameters())])
        equal = [torch.equal(a, b) for a, b in zip(*results, strict=True)]
        print(f"{dtype!s:15} the same bits: result {equal[0]}, gradients of the norms {all(equal[1:])}")
        assert equal[0]


if __name__ == "__main__":
    main()
