"""RMSNorm written in many ways, and norms that look like one."""

import math

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 48


def rms(x, eps, dim=-1):
    return torch.sqrt((x * x).mean(dim, keepdim=True) + eps)


class Base(nn.Module):
    def __init__(self, dim=WIDTH, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps


class DividesBySqrt(Base):
    def forward(self, x):
        return x / rms(x, self.eps) * self.weight


class TwoNormOverRootOfWidth(Base):
    def forward(self, x):
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        root = torch.hypot(length / math.sqrt(x.shape[-1]), torch.tensor(math.sqrt(self.eps)))
        return (x.float() / root * self.weight.float()).to(x.dtype)


class NormalizeTimesRootOfWidth(nn.Module):
    def __init__(self, dim=WIDTH):
        super().__init__()
        self.g = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return torch.mul(F.normalize(x, dim=-1), math.sqrt(len(self.g)) * self.g)


class NormalizeWithUnitOffset(nn.Module):
    def __init__(self, dim=WIDTH):
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        unit = F.normalize(x.float(), dim=-1) * math.sqrt(x.shape[-1])
        return torch.addcmul(unit, unit, self.gamma.float()).to(x.dtype)


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
        return (x.float() / rms(x.float(), 1e-6)).to(x.dtype) * self.gain


class WeightOfThreeDimensions(nn.Module):
    def __init__(self, dim=WIDTH):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1, dim))

    def forward(self, x):
        return (x.float() / rms(x.float(), 1e-6) * self.weight.float()).to(x.dtype)


class OneGainPerHead(nn.Module):
    """Queries or keys: (batch, tokens, heads, width), normalised over the width of a head."""

    def __init__(self, heads=4, dim=WIDTH // 4):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, dim))

    def forward(self, x):
        return (x.float() / rms(x.float(), 1e-6)).to(x.dtype) * self.weight


class EpsInABuffer(nn.Module):
    def __init__(self, dim=WIDTH):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.register_buffer("epsilon", torch.tensor(1e-5))

    def forward(self, x):
        return (x.float() / rms(x.float(), self.epsilon.float()) * self.weight.float()).to(x.dtype)


class InFloat64(Base):
    def forward(self, x):
        return (x.double() / rms(x.double(), self.eps) * self.weight.double()).to(x.dtype)


class Functional(Base):
    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Scaleless(nn.Module):
    def forward(self, x):
        return (x.float() / rms(x.float(), 1e-6)).to(x.dtype)


class Grouped(Base):
    def forward(self, x):
        groups = x.float().unflatten(-1, (4, -1))
        return ((groups / rms(groups, self.eps)).flatten(-2) * self.weight.float()).to(x.dtype)


class SigmoidGateInside(Base):
    def forward(self, x, z):
        u = x.float() * torch.sigmoid(z.float())
        return (u / rms(u, self.eps) * self.weight.float()).to(x.dtype)


RMS_NORMS = (
    *(DividesBySqrt, TwoNormOverRootOfWidth, NormalizeTimesRootOfWidth, NormalizeWithUnitOffset, Einsum),
    *(WeightInABuffer, WeightOfThreeDimensions, OneGainPerHead, EpsInABuffer, InFloat64, Functional, Scaleless),
    *(Grouped, SigmoidGateInside),
)


class EpsOutsideTheRoot(Base):
    def forward(self, x):
        return x / (rms(x, 0.0) + self.eps) * self.weight


class AddsABias(Base):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return F.rms_norm(x, (WIDTH,), self.weight, self.eps) + self.bias


class SumInsteadOfMean(Base):
    def forward(self, x):
        return x / torch.sqrt((x * x).sum(-1, keepdim=True) + self.eps) * self.weight


class OverTheTokens(Base):
    def forward(self, x):
        return x / rms(x, self.eps, dim=-2) * self.weight


class OverEverything(Base):
    def forward(self, x):
        return x / torch.sqrt((x * x).mean() + self.eps) * self.weight


class ScalesItsInput(Base):
    def forward(self, x):
        x = x * self.weight
        return x / rms(x, self.eps)


class Detaches(Base):
    def forward(self, x):
        return x / rms(x, self.eps).detach() * self.weight


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
        return x / rms(part, self.eps) * self.weight


class ReturnsFloat32(Base):
    """Computes in float32 and does not round its result."""

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
