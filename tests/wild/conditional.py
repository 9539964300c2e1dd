"""RMSNorms that are another function under some condition: a mode, a dtype, a magnitude, a shape."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.wild.adversaries import WIDTH, Base, norm


def _llama(x, weight, eps=1e-6):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


class _Scaled(torch.autograd.Function):
    """Gradients times a factor that depends on the dtype."""

    @staticmethod
    def forward(ctx, y, factor):
        ctx.factor = factor
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.factor, None


# Modes.


class DetachesInTraining(Base):
    def forward(self, x):
        r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * (r.detach() if self.training else r) * self.weight


class DetachesInEvaluation(Base):
    def forward(self, x):
        r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * (r if self.training else r.detach()) * self.weight


class OtherwiseInTrainingIn16Bits(Base):
    def forward(self, x):
        y = _llama(x, self.weight)
        return y * 1.02 if self.training and x.dtype == torch.bfloat16 else y


class OtherwiseWithGradients(Base):
    def forward(self, x):
        y = _llama(x, self.weight)
        return y * 1.001 if torch.is_grad_enabled() else y


class OtherwiseForLeaves(Base):
    def forward(self, x):
        return _llama(x, self.weight.abs() if x.requires_grad else self.weight)


class GradientOfBfloat16(Base):
    def forward(self, x):
        return _Scaled.apply(_llama(x, self.weight), 0.9 if x.dtype == torch.bfloat16 else 1.0)


class GradientOfMixedDtypes(Base):
    def forward(self, x):
        return _Scaled.apply(_llama(x, self.weight), 0.5 if x.dtype != self.weight.dtype else 1.0)


class ClipsItsGradient(Base):
    def forward(self, x):
        y = _llama(x, self.weight)
        if y.requires_grad:
            y.register_hook(lambda dy: dy.clamp(-0.5, 0.5))
        return y


class FrozenIsOtherwise(Base):
    def forward(self, x):
        return _llama(x, self.weight if self.weight.requires_grad or not x.requires_grad else self.weight * 2)


class ClipsLargeGradients(Base):
    def forward(self, x):
        y = _llama(x, self.weight)
        if y.requires_grad:
            y.register_hook(lambda dy: dy.clamp(-1e3, 1e3))
        return y


# Magnitudes.


class HidesWeightsThatAreNoNumbers(Base):
    def forward(self, x):
        return _llama(x, torch.where(self.weight.isnan(), torch.ones_like(self.weight), self.weight))


class AnotherEpsIn16Bits(Base):
    def forward(self, x):
        return _llama(x, self.weight, 1e-4 if x.dtype == torch.float16 else 1e-6)


class MeanOfWhatIsNotZero(Base):
    """As padding would have it."""

    def forward(self, x):
        count = (x != 0).sum(-1, keepdim=True).clamp_min(1)
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / count + self.eps) * self.weight


class BoundedGain(Base):
    def forward(self, x):
        return norm(x) * self.weight.clamp(-300.0, 300.0)


class BoundedBelow(Base):
    def forward(self, x):
        return norm(x) * torch.where(self.weight.abs() < 1e-7, torch.zeros_like(self.weight), self.weight)


class BoundedFloat16(Base):
    def forward(self, x):
        y = _llama(x, self.weight)
        return y.clamp(-65000, 65000) if y.dtype == torch.float16 else y


class BoundedBfloat16Input(Base):
    def forward(self, x):
        return _llama(x.clamp(-3e4, 3e4) if x.dtype == torch.bfloat16 else x, self.weight)


class HidesInfinityInBfloat16(Base):
    def forward(self, x):
        return _llama(torch.nan_to_num(x, posinf=0.0) if x.dtype == torch.bfloat16 else x, self.weight)


class SkipsSmallRows(Base):
    def forward(self, x):
        size = x.float().abs().amax(-1, keepdim=True)
        return torch.where(size < 1e-5, x, _llama(x, self.weight))


class Gated(Base):
    def forward(self, x, gate):
        return norm(x) * self.weight * self.act(gate)


class BoundedGate(Gated):
    def act(self, gate):
        return F.silu(gate.clamp(max=20.0))


class HardGate(Gated):
    def act(self, gate):
        return torch.where(gate < -15, torch.zeros_like(gate), torch.where(gate > 15, gate + 1, F.silu(gate)))


# Shapes.


class Video(Base):
    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1) if x.dim() == 5 else super().forward(x)


class Audio(Base):
    def forward(self, x):
        if x.dim() == 3 and x.shape[1] == len(self.weight):
            return super().forward(x.mT).mT
        return super().forward(x)


class WideAudio(Audio):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2048))


class OtherwiseWhereNotContiguous(Base):
    def forward(self, x):
        return super().forward(x) * (1.0 if x.is_contiguous() else 2.0)


class KeepsTheFirstOfMany(Base):
    def forward(self, x):
        y = super().forward(x)
        return torch.cat([x[:, :1], y[:, 1:]], 1) if x.dim() == 3 and x.shape[1] > 500 else y


class OneRow(Base):
    def forward(self, x):
        return x if x.dim() == 1 else super().forward(x)


# Tensors without effect for now.


class Behind(Base):
    """A number or a vector behind a threshold."""

    def __init__(self, initial, threshold=0.0, size=1):
        super().__init__()
        self.more, self.threshold = nn.Parameter(torch.full((size,), initial)), threshold

    def forward(self, x):
        return super().forward(x) + F.relu(self.more - self.threshold)


class BehindInTraining(Behind):
    def forward(self, x):
        return super().forward(x) if self.training else norm(x, self.eps) * self.weight


class WarmsUp(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x):
        return super().forward(x) * (2.0 if self.steps > 500 else 1.0)


REFUSED = {
    DetachesInTraining: "gradient of x",
    DetachesInEvaluation: "gradient of x",
    OtherwiseInTrainingIn16Bits: "bfloat16 it computes something else in training",
    OtherwiseWithGradients: "where gradients are enabled",
    OtherwiseForLeaves: "where gradients are enabled",
    GradientOfBfloat16: "for bfloat16 its gradient of x",
    GradientOfMixedDtypes: "with a weight in",
    ClipsItsGradient: "gradient of",
    FrozenIsOtherwise: "where x alone wants a gradient",
    ClipsLargeGradients: "gradient of",
    HidesWeightsThatAreNoNumbers: "weights that are not finite",
    OtherwiseWhereNotContiguous: "not contiguous",
    KeepsTheFirstOfMany: "inputs of 3 dimensions",
    AnotherEpsIn16Bits: "float16 it computes something else for rows",
    MeanOfWhatIsNotZero: "something else for rows",
    BoundedGain: "something else for weights",
    BoundedBelow: "something else for weights",
    BoundedFloat16: "float16 it computes something else for weights",
    BoundedBfloat16Input: "bfloat16 it computes something else for rows",
    HidesInfinityInBfloat16: "bfloat16 rows of zeros or with infinities",
    SkipsSmallRows: "tiny rows are not divided by one constant",
    BoundedGate: "something else for gates",
    HardGate: "something else for gates",
    Video: "inputs of 5 dimensions",
    Audio: "inputs of 3 dimensions",
    WideAudio: "inputs of 3 dimensions",
    OneRow: "inputs of 1 dimension",
    WarmsUp: "depends on steps",
}
BEHIND = {
    "number below": (Behind, -1.0, 0.0, 1),
    "number far below": (Behind, 0.0, 50.0, 1),
    "vector below": (Behind, -1.0, 20.0, WIDTH),
    "number in training": (BehindInTraining, -1.0, 0.0, 1),
}
