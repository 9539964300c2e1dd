"""Replaces the norms of a model by this library's, in place, and puts them back.

python examples/patch_model.py
"""

import torch
from torch import Tensor, nn

import rmsnorm


class TheirNorm(nn.Module):
    """As a model's own code has it; recognised by what it computes."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(dim) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), TheirNorm(64), nn.GELU(), nn.Linear(64, 64), nn.RMSNorm(64, eps=1e-5))
    x = torch.randn(8, 32)
    before, names = model(x), list(model.state_dict())

    report = rmsnorm.patch(model)
    print(report)
    assert len(report.replaced) == 2
    assert list(model.state_dict()) == names
    after = model(x)
    print(f"largest difference: {(after - before).abs().max().item():.1e}")
    # The norms differ by roundings of float32, where others sum in another order.
    torch.testing.assert_close(after, before)

    rmsnorm.unpatch(model)
    assert torch.equal(model(x), before)


if __name__ == "__main__":
    main()
