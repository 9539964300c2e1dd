"""RMSNorm in the styles people write it, from memory, and norms that look like one."""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 48


class Base(nn.Module):
    def __init__(self, dim=WIDTH, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps


class DividesBySqrt(Base):
    def forward(self, x):
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class TwoNormOverRootOfWidth(Base):
    def forward(self, x):
        mean_square = x.float().norm(2, dim=-1, keepdim=True) ** 2 / x.shape[-1]
        return (x.float() * (mean_square + self.eps) ** -0.5 * self.weight.float()).to(x.dtype)


class NormalizeTimesRootOfWidth(nn.Module):
    def __init__(self, dim=WIDTH):
        super().__init__()
        self.g = nn.Parameter(torch.ones(dim))
        self.scale = dim**0.5

    def forward(self, x):
        return F.normalize(x, dim=-1) * self.scale * self.g


class NormalizeWithUnitOffset(nn.Module):
    def __init__(self, dim=WIDTH):
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        return F.normalize(x.float(), dim=-1).mul(x.shape[-1] ** 0.5 * (self.gamma.float() + 1)).type_as(x)


class Einsum(nn.Module):
    def __init__(self, dim=WIDTH):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        wide = x.float()
        mean_square = torch.einsum("...d,...d->...", wide, wide) / x.shape[-1]
        return torch.einsum("...d,...,d->...d", wide, (mean_square + 1e-6).rsqrt(), self.scale.float()).to(x.dtype)


class WeightInABuffer(nn.Module):
    def __init__(self, dim=WIDTH):
        super().__init__()
        self.register_buffer("gain", torch.ones(dim))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.gain


class WeightOfThreeDimensions(nn.Module):
    def __init__(self, dim=WIDTH):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1, dim))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * self.weight.float()).to(x.dtype)


class OneGainPerHead(nn.Module):
    """Queries or keys: (batch, tokens, heads, width), normalised over the width of a head."""

    def __init__(self, heads=4, dim=WIDTH // 4):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, dim))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).type_as(x) * self.weight


class EpsInABuffer(nn.Module):
    def __init__(self, dim=WIDTH):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.register_buffer("epsilon", torch.tensor(1e-5))

    def forward(self, x):
        mean_square = x.float().square().mean(-1, keepdim=True)
        return (self.weight.float() * x.float() * torch.rsqrt(mean_square + self.epsilon.float())).to(x.dtype)


class InFloat64(Base):
    def forward(self, x):
        wide = x.double()
        return (wide / (wide.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight.double()).to(x.dtype)


class Functional(Base):
    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Scaleless(nn.Module):
    def forward(self, x):
        return (x.float() * x.float().square().mean(-1, keepdim=True).add(1e-6).rsqrt()).to(x.dtype)


class Grouped(Base):
    def forward(self, x):
        groups = x.float().unflatten(-1, (4, -1))
        groups = groups * groups.square().mean(-1, keepdim=True).add(self.eps).rsqrt()
        return (groups.flatten(-2) * self.weight.float()).to(x.dtype)


class SigmoidGateInside(Base):
    def forward(self, x, z):
        wide = x.float() * torch.sigmoid(z.float())
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight.float()).to(x.dtype)


RMS_NORMS = (
    *(DividesBySqrt, TwoNormOverRootOfWidth, NormalizeTimesRootOfWidth, NormalizeWithUnitOffset, Einsum),
    *(WeightInABuffer, WeightOfThreeDimensions, OneGainPerHead, EpsInABuffer, InFloat64, Functional, Scaleless),
    *(Grouped, SigmoidGateInside),
)


class EpsOutsideTheRoot(Base):
    def forward(self, x):
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps) * self.weight


class AddsABias(Base):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return F.rms_norm(x, (WIDTH,), self.weight, self.eps) + self.bias


class SumInsteadOfMean(Base):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.eps) * self.weight


class OverTheTokens(Base):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + self.eps) * self.weight


class OverEverything(Base):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean() + self.eps) * self.weight


class ScalesItsInput(Base):
    def forward(self, x):
        x = x * self.weight
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Detaches(Base):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps).detach() * self.weight


class DropsOut(Base):
    def forward(self, x):
        return F.dropout(F.rms_norm(x, (WIDTH,), self.weight, self.eps), 0.5, self.training)


class SquaresTheWeight(Base):
    def forward(self, x):
        return F.rms_norm(x, (WIDTH,), self.weight * self.weight, self.eps)


class PartOfTheRow(Base):
    """The statistics of the first quarter, as in partial RMSNorm."""

    def forward(self, x):
        part = x[..., : x.shape[-1] // 4]
        return x * torch.rsqrt(part.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class ReturnsFloat32(Base):
    """Computes as Gemma does, and forgets to round."""

    def forward(self, x):
        return F.rms_norm(x.float(), (WIDTH,), self.weight.float(), self.eps)


OTHERS = (
    (EpsOutsideTheRoot, "inside the square root"),
    (AddsABias, "adds"),
    (SumInsteadOfMean, "L2"),
    (OverTheTokens, "other dimensions"),
    (OverEverything, "other dimensions"),
    (ScalesItsInput, "not the root mean square"),
    (Detaches, "gradient of x"),
    (DropsOut, "in training"),
    (SquaresTheWeight, "none of its parameters"),
    (PartOfTheRow, "not the root mean square"),
    (ReturnsFloat32, "returns float32"),
    (lambda: nn.LayerNorm(WIDTH), "LayerNorm"),
    (lambda: nn.LayerNorm(WIDTH, bias=False), "LayerNorm"),
    (lambda: nn.GroupNorm(1, WIDTH), "not its input's last dimension"),
    (lambda: nn.BatchNorm1d(WIDTH), "does not run"),
    (lambda: nn.Linear(WIDTH, WIDTH), "does not normalise"),
    (lambda: nn.Identity(), "does not normalise"),
    (lambda: nn.RMSNorm(1), "size of a row"),
    (lambda: nn.Sequential(nn.RMSNorm(WIDTH)), "submodules"),
)
