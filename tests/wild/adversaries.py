"""Modules that are RMSNorms where one looks first and something else where one does not; and the other way round."""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 64


def rms(x, eps=1e-6, dim=-1):
    return torch.sqrt((x * x).mean(dim, keepdim=True) + eps)


def norm(x, eps=1e-6):
    return x / rms(x, eps)


class Base(nn.Module):
    def __init__(self, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.eps = eps

    def forward(self, x):
        return norm(x, self.eps) * self.weight


# Of values.


class ClampsItsInput(Base):
    def forward(self, x):
        return norm(x.clamp(-1e4, 1e4)) * self.weight


class ClampsItsResult(Base):
    def forward(self, x):
        return (norm(x) * self.weight).clamp(-10, 10)


class ClampsTheMeanSquare(Base):
    def forward(self, x):
        return x / rms(x, 0.0).clamp_min(self.eps**0.5) * self.weight


class HidesNaN(Base):
    def forward(self, x):
        return torch.nan_to_num(super().forward(x))


class NormalisesTwice(Base):
    """Off by half of eps, everywhere: ten units in the last place of float32."""

    def forward(self, x):
        return norm(norm(x)) * self.weight


class DividesByOneLess(Base):
    def forward(self, x):
        return x / rms(x * (WIDTH / (WIDTH - 1)) ** 0.5, self.eps) * self.weight


class MeanOfMagnitudes(Base):
    def forward(self, x):
        return x / (x.abs().mean(-1, keepdim=True) + self.eps) * self.weight


class InFloat16(Base):
    def forward(self, x):
        return (norm(x.half()) * self.weight).to(x.dtype)


class RoundsItsWeight(Base):
    def forward(self, x):
        return (norm(x.float()) * self.weight.bfloat16().float()).to(x.dtype)


class RoundsToSteps(Base):
    def forward(self, x):
        return ((norm(x.float()) * self.weight.float() * 64).round() / 64).to(x.dtype)


class Activates(Base):
    def forward(self, x):
        return F.relu(super().forward(x))


# Of weights.


class LogarithmOfTheScale(Base):
    def forward(self, x):
        return norm(x) * self.weight.exp()


class MagnitudeOfTheScale(Base):
    def forward(self, x):
        return norm(x) * self.weight.abs()


class ScaleFromAProperty(nn.Module):
    def __init__(self):
        super().__init__()
        self.log = nn.Parameter(torch.zeros(WIDTH))

    @property
    def weight(self):
        return self.log.exp()

    def forward(self, x):
        return norm(x) * self.weight


class WeightUnderAnotherName(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = nn.Parameter(torch.ones(WIDTH))

    @property
    def weight(self):
        return self.own

    def forward(self, x):
        return norm(x) * self.weight


class Float16Weight(Base):
    def __init__(self):
        super().__init__()
        self.half()

    def forward(self, x):
        return (norm(x.float()) * self.weight).to(x.dtype)


class WeightOfIntegers(Base):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.int32), requires_grad=False)


class WeightInFloat8(Base):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(self.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x):
        return norm(x) * self.weight.to(x.dtype)


class WeightAsAnAttribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.ones(WIDTH)

    def forward(self, x):
        return (norm(x) * self.weight).to(x.dtype)


class TwoWeights(Base):
    def __init__(self):
        super().__init__()
        self.more = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return super().forward(x) * self.more


class LowRankWeight(Base):
    """As adapters do: nothing, until they are trained."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return norm(x) * (self.weight + self.a @ self.b)


class BiasOfZeros(Base):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return super().forward(x) + self.bias


class OneNumber(Base):
    """A parameter of one element, which does nothing at its initial value."""

    def __init__(self, use, initial):
        super().__init__()
        self.number, self.use = nn.Parameter(torch.tensor([initial])), use

    def forward(self, x):
        return self.use(x, super().forward(x), self.number)


class OneNumberInABuffer(OneNumber):
    def __init__(self, use, initial):
        super().__init__(use, initial)
        del self.number
        self.register_buffer("number", torch.tensor([initial]))


class LearnedEps(Base):
    def __init__(self):
        super().__init__()
        self.eps = nn.Parameter(torch.tensor(1e-6))


class UnusedBuffers(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("initialised", torch.tensor(True))
        self.register_buffer("largest", torch.zeros(1))


# Of rows.


class OverTheSecondDimension(Base):
    def forward(self, x):
        return x / rms(x, self.eps, dim=1) * self.weight


class ImagesOfFourDimensions(Base):
    def forward(self, x):
        if x.dim() < 4:
            return super().forward(x)
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class LongInputs(Base):
    def forward(self, x):
        return super().forward(x) if len(x) < 12 else x


class HalfOfTheRow(Base):
    def forward(self, x):
        a, b = x.chunk(2, -1)
        return torch.cat([norm(a), b], -1) * self.weight


class HeadsOfOneWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH // 4))

    def forward(self, x):
        return (norm(x.unflatten(-1, (4, -1))) * self.weight).flatten(-2)


class OnlyThreeDimensions(Base):
    def forward(self, x):
        _batch, _tokens, _width = x.shape
        return super().forward(x)


# Of what happens besides.


class Counts(Base):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class RunningMean(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("running", torch.ones(1))

    def forward(self, x):
        if self.training:
            self.running.mul_(0.9).add_(x.detach().float().pow(2).mean(), alpha=0.1)
        return super().forward(x)


class WritesToItsInput(Base):
    def forward(self, x):
        return x.div_(rms(x, self.eps)) * self.weight


class DropsOut(Base):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.1, self.training)


class ReturnsATuple(Base):
    def forward(self, x):
        return super().forward(x), x


class NeedsAKeyword(Base):
    def forward(self, x, *, scale):
        return super().forward(x) * scale


class TakesAResidual(Base):
    def forward(self, x, residual=None):
        return super().forward(x) if residual is None else (super().forward(x + residual), x + residual)


class ScalesTheGradient(Base):
    def forward(self, x):
        return norm(x) * (self.weight * 0.1 + self.weight.detach() * 0.9)


class WithoutGradients(Base):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        return norm(x) * weight

    @staticmethod
    def backward(ctx, dy):
        return dy, dy.flatten(0, -2).sum(0)


class BackwardOfItsOwn(Base):
    def forward(self, x):
        return _WrongBackward.apply(x, self.weight)


class MoreExactThanItsKind(Base):
    """Its result has the dtype that Llama's has in every pair of dtypes, but is rounded once."""

    def forward(self, x):
        return (norm(x.float()) * self.weight.float()).to(torch.promote_types(x.dtype, self.weight.dtype))


ACCEPTED = {
    **{f"eps of {eps:g}": (lambda eps=eps: Base(eps), "before_scale") for eps in (1e3, 1.0, 1e-12, 1e-38, 1e-45, 0.0)},
    "weight under another name": (WeightUnderAnotherName, "own, before_scale"),
    "a float16 weight": (Float16Weight, "weight, once"),
    "buffers without a part in it": (UnusedBuffers, "weight, before_scale"),
    "three dimensions only": (OnlyThreeDimensions, "weight, before_scale"),
    "a residual it may be given": (TakesAResidual, "weight, before_scale"),
    "more exact than its kind": (MoreExactThanItsKind, "weight, once"),
    "in float64": (lambda: Base().double(), "before_scale"),
}
REFUSED = {
    ClampsItsInput: "root mean square",
    ClampsItsResult: "results are not reproduced",
    ClampsTheMeanSquare: "inside the square root",
    HidesNaN: "something else for weights of other magnitudes",
    NormalisesTwice: "off by a factor",
    DividesByOneLess: "multiplies by 0.992",
    MeanOfMagnitudes: "root mean square",
    InFloat16: "not finite",
    RoundsItsWeight: "none of its parameters",
    RoundsToSteps: "root mean square",
    Activates: "activation",
    LogarithmOfTheScale: "none of its parameters",
    MagnitudeOfTheScale: "results are not reproduced",
    ScaleFromAProperty: "none of its parameters",
    WeightOfIntegers: "depends on weight, which is no weight",
    WeightInFloat8: "weight is float8_e4m3fn",
    WeightAsAnAttribute: "depends on weight, which is neither",
    TwoWeights: "none of its parameters",
    LowRankWeight: "none of its parameters",
    BiasOfZeros: "adds something, a bias",
    LearnedEps: "its eps is learned: the parameter eps",
    OverTheSecondDimension: "other dimensions than the last",
    ImagesOfFourDimensions: "something else for inputs of 4 dimensions",
    LongInputs: "something else for inputs of 1 dimension",
    HalfOfTheRow: "does not normalise",
    HeadsOfOneWeight: "does not run on an input of 2x3x16",
    Counts: "changes its calls",
    RunningMean: "changes its running",
    WritesToItsInput: "writes to its input",
    DropsOut: "in training",
    ReturnsATuple: "returns tuple",
    NeedsAKeyword: "missing 1 required keyword-only argument: 'scale'",
    ScalesTheGradient: "gradient of weight",
    WithoutGradients: "no gradient",
    BackwardOfItsOwn: "gradient of x",
}
ONE_NUMBER = {
    "bias": (lambda x, y, number: y + number, 0.0),
    "gain": (lambda x, y, number: y * number, 1.0),
    "residual": (lambda x, y, number: y + number * x, 0.0),
}
