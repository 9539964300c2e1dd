"""Exports a model with a norm: the program needs no rmsnorm, and takes any batch.

python examples/export.py
"""

import torch
from torch import nn

import rmsnorm


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), rmsnorm.RMSNorm(64), nn.Linear(64, 4)).eval()
    x = torch.randn(3, 16)
    batch = torch.export.Dim("batch", min=2, max=1024)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    assert "rmsnorm" not in str(program.graph)
    found = program.module()(torch.randn(100, 16))
    print(f"exported: {len(list(program.graph.nodes))} nodes of PyTorch's own, {tuple(found.shape)} for a batch of 100")
    torch.testing.assert_close(program.module()(x), model(x))


if __name__ == "__main__":
    main()
