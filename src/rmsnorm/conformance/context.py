"""One implementation under examination: it is run here, and what is right stands beside it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rmsnorm.conformance import exact
from rmsnorm.conformance.form import DTYPES, EPS, WIDTH, Form
from rmsnorm.conformance.implementation import (
    BackwardRaised,
    Crashed,
    Implementation,
    NoGradient,
    Norm,
    Raised,
    as_result,
    described,
)
from rmsnorm.numerics import reference
from rmsnorm.spec import make_spec

# Units in the last place that a result may be off by, beyond what its convention has to round (docs/conformance.md).
SLACK = 1.0


@dataclass(frozen=True)
class Gradients:
    """What a backward pass left: y, dx and dweight (None without a weight), on the CPU."""

    y: Tensor
    dx: Tensor
    dweight: Tensor | None


class CheckContext:
    """An implementation, its form, and the device to run it on. Tensors come and go on the CPU."""

    def __init__(self, implementation: Implementation, form: Form, device: torch.device) -> None:
        self.implementation = implementation
        self.form = form
        self.device = device

    @property
    def width(self) -> int:
        """The width of rows where any will do, of whole blocks where a result is quantised by blocks."""
        return self.implementation.width or (2 * WIDTH if self.implementation.quantized else WIDTH)

    def widths(self, *wanted: int) -> tuple[int, ...]:
        """Those that can be asked for: all of them, or its only one."""
        return wanted if self.implementation.width is None else (self.implementation.width,)

    @property
    def takes_eps(self) -> bool:
        """Whether an eps that is given is also used."""
        return self.implementation.takes_eps and self.form.eps is not None and abs(self.form.eps / EPS - 1) < 1e-2

    @property
    def eps(self) -> float:
        """The eps at work unless one is given."""
        return EPS if self.form.eps is None else self.form.eps

    def rows(self, count: int, width: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
        """Normally distributed rows."""
        return (torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)

    def weight(self, width: int, dtype: torch.dtype, seed: int = 1) -> Tensor | None:
        """A weight whose gains are of both signs and between a half and one and a half; None if there is none."""
        if not self.form.weighted:
            return None
        generator = torch.Generator().manual_seed(seed)
        gain = torch.empty(width).uniform_(0.5, 1.5, generator=generator)
        gain *= torch.empty(width).uniform_(generator=generator).sub_(0.25).sign()
        return (gain - self.form.offset).to(dtype)

    def norm(self, weight: Tensor | None, width: int, eps: float | None = None, offset: float | None = None) -> Norm:
        """The implementation with this weight."""
        chosen = (EPS if eps is None else eps) if self.implementation.takes_eps else None
        on_device = None if weight is None else weight.to(self.device)
        return self.implementation.norm(on_device, chosen, offset, width)

    def run(self, x: Tensor, weight: Tensor | None, eps: float | None = None, offset: float | None = None) -> Tensor:
        """Its result, without gradients, for a copy of x."""
        with torch.no_grad():
            norm = self.norm(weight, x.shape[-1], eps, offset)
            return norm(x.to(self.device, copy=True)).detach().cpu()

    def exact(self, x: Tensor, weight: Tensor | None, eps: float | None = None, offset: float | None = None) -> Tensor:
        """What it ought to return, in float64."""
        used = self.eps if eps is None or not self.takes_eps else eps
        return self.form.normalized(x, self.form.gain(weight, offset), used)

    def staged(self, x: Tensor, weight: Tensor | None, offset: float | None = None) -> Tensor:
        """As `exact`, with the rounding that the convention has before the weight.

        That one is no chance: the elements of a bfloat16 row have 128 different fractions, and a reciprocal near one
        rounds all of them one way.
        """
        x_hat = self.form.normalized(x, None, self.eps)
        gain = self.form.gain(weight, offset)
        if weight is None or gain is None:
            return x_hat
        return reference.round_x_hat(x_hat, x.dtype, weight, make_spec(rounding=self.form.rounding)) * gain

    def limit(self, dtype: torch.dtype) -> float:
        """The units in the last place that a result may be off by: its convention's own roundings, and one.

        A rounding to the nearest is off by half a unit of what it rounds, and by up to one unit of a result that has a
        smaller fraction. In 16 bits there is the last one, and one before the weight where the convention has it there.
        In float32 and float64 there are those of the product with the weight, x_hat, the reciprocal root, the gain if
        it has an offset; and by half, under the root, those of a square, the mean, eps and four of a sum.
        """
        if dtype.itemsize == 2:
            early = self.form.weighted and self.form.rounding != "once"
            return 0.5 + (1.0 if early else 0.0) + SLACK
        products = 1.5 if self.form.weighted else 0.5
        return products + 1.0 + 7 / 2 + (1.0 if self.form.offset else 0.0) + SLACK

    def errors(self, y: Tensor, correct: Tensor, x: torch.dtype, weight: torch.dtype | None) -> Tensor:
        """In units in the last place of the coarsest dtype that the convention rounds to."""
        return exact.errors(y, correct, self.form.precision(x, weight, y.dtype))

    def worst(self, x: Tensor, weight: Tensor | None, eps: float | None = None) -> float:
        """The largest error of its result, in limits: above one is wrong."""
        y = self.run(x, weight, eps)
        error = self.errors(y, self.exact(x, weight, eps), x.dtype, None if weight is None else weight.dtype)
        return float(error.max()) / self.limit(x.dtype) if error.numel() else 0.0

    def gradients(self, x: Tensor, weight: Tensor | None, dy: Tensor) -> Gradients:
        """Its result and gradients; a weight's that is missing is None.

        Raises:
            NoGradient: none comes to x.
            BackwardRaised, Refused, Crashed: it raised, backward or forward.
        """
        return self.gradients_of(self.norm(weight, x.shape[-1]), x, dy)

    def gradients_of(self, norm: Norm, x: Tensor, dy: Tensor) -> Gradients:
        """As `gradients`, of a norm that is there, and has maybe been called before."""
        if norm.weight is not None:
            norm.weight.grad = None
        leaf = x.to(self.device, copy=True).requires_grad_()
        y = norm(leaf)
        if not y.requires_grad:
            raise NoGradient("its result has no gradient: what comes before it silently stops learning")
        try:
            y.backward(dy.to(self.device, y.dtype, copy=True))
        except Exception as error:
            raise BackwardRaised(f"backward raises {described(error)}") from error
        if leaf.grad is None:
            raise NoGradient("x gets no gradient")
        dweight = None if norm.weight is None or norm.weight.grad is None else norm.weight.grad.cpu().flatten()
        return Gradients(y.detach().cpu(), leaf.grad.cpu(), dweight)

    def exact_gradients(self, x: Tensor, weight: Tensor | None, dy: Tensor, eps: float | None = None) -> Gradients:
        """What they ought to be, by float64 autograd of the same form."""
        used = self.eps if eps is None or not self.takes_eps else eps
        wide = x.double().requires_grad_()
        leaf = None if weight is None else weight.double().requires_grad_()
        y = self.form.normalized(wide, self.form.gain(leaf), used)
        y.backward(dy.double())
        assert wide.grad is not None  # noqa: S101 - it is a leaf
        return Gradients(y.detach(), wide.grad, None if leaf is None else leaf.grad)

    @cached_property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Those of float32 and bfloat16 that it takes, else float16: what is asked in all is about none of them."""
        taken = self.all_dtypes
        return tuple(dtype for dtype in taken if dtype != torch.float16) or taken

    @cached_property
    def all_dtypes(self) -> tuple[torch.dtype, ...]:
        """Those of float32, bfloat16 and float16 that it takes."""
        taken = []
        for dtype in DTYPES:
            try:
                self.run(self.rows(4, self.width, dtype), self.weight(self.width, dtype))
            except Raised:
                continue
            taken.append(dtype)
        return tuple(taken)

    @cached_property
    def untrained(self) -> str:
        """Why nothing more is asked of its gradients; nothing if ordinary rows and the weight get theirs."""
        if not self.implementation.trains:
            return "for inference only"
        for dtype in self.dtypes:
            x, weight = self.rows(6, self.width, dtype, seed=27), self.weight(self.width, dtype)
            dy = self.rows(6, self.width, dtype, seed=28) + x
            try:
                got = self.gradients(x, weight, dy)
            except Raised:
                return "its gradients are missing anyway"
            if got.dweight is None and weight is not None:
                return "its gradients are missing anyway"
        return ""

    @cached_property
    def compiled(self) -> dict[torch.dtype, tuple[Tensor, Tensor, Tensor]]:
        """For each dtype x, the eager result and the compiled one's. All in one graph: a compilation takes seconds.

        Raises:
            Crashed: it does not compile, or the result does not run.
        """
        width = self.widths(1000)[0]
        dtypes = self.dtypes
        inputs = [self.rows(48, width, dtype, seed=11) for dtype in dtypes]
        norms = [self.norm(self.weight(width, dtype), width) for dtype in dtypes]
        with torch.no_grad():
            eager = [norm(x.to(self.device, copy=True)).cpu() for norm, x in zip(norms, inputs, strict=True)]

            def together(xs: list[Tensor]) -> list[Any]:
                return [norm.call(x) for norm, x in zip(norms, xs, strict=True)]

            torch._dynamo.reset()
            try:
                results = torch.compile(together, dynamic=False)([x.to(self.device, copy=True) for x in inputs])
            except (Exception, SystemExit) as error:
                raise Crashed(described(error)) from error
            quick = [as_result(y, x).cpu() for y, x in zip(results, inputs, strict=True)]
        return dict(zip(dtypes, zip(inputs, eager, quick, strict=True), strict=True))


def far_off(got: Tensor, correct: Tensor) -> bool:
    """Whether a result is another one, and not merely inexact: what is stale, misplaced or was never written.

    The limit is a share of the largest of each row: sixteen roundings of bfloat16, and in float32, where a row may be
    long and its sum naive, 2^-10. NaN is far off.
    """
    limit = 2.0**-5 if got.dtype.itemsize == 2 else 2.0**-10
    apart = (got.detach().double().cpu() - correct).abs()
    return not bool((apart <= limit * correct.abs().amax(-1, keepdim=True)).all())


def wrong_gradient(got: Gradients, correct: Gradients) -> str:
    """Which gradient is far off; one that is missing is for the checks of gradients."""
    if far_off(got.dx, correct.dx):
        return "dx"
    if got.dweight is not None and correct.dweight is not None and far_off(got.dweight.flatten(), correct.dweight):
        return "dweight"
    return ""


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits, with NaN equal to NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return bool(((a.contiguous().view(integers) == b.contiguous().view(integers)) | (a.isnan() & b.isnan())).all())
