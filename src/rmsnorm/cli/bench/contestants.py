"""Everything a user would pick for an RMSNorm, as far as it is installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor

import rmsnorm
from rmsnorm.benchmarking.peers import PEERS, Unavailable, ncnn_norm, onnx_session
from rmsnorm.cli.bench.shapes import Case
from rmsnorm.cli.bench.tensors import EPS, Inputs


@dataclass(frozen=True)
class Norm:
    """One implementation, made for the inputs of a case.

    Attributes:
        forward: y from x and weight.
        add: y and h from x, residual and weight, in one call; None if the sum is an operation of its own.
        quantized: q and its scales from x and weight; None if y is quantised by PyTorch's operations.
        differentiable: whether PyTorch can differentiate it.
        formula: what it is held to, RMSNorm or LayerNorm.
    """

    forward: Callable[[Tensor, Tensor], Tensor]
    add: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    quantized: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    differentiable: bool = True
    formula: str = "RMSNorm"


Maker = Callable[[Case, Inputs], Norm]
# Of int8; and a scale that no row of numbers is below.
QMAX, SMALLEST = 127.0, 1e-30


def ours(case: Case, inputs: Inputs) -> Norm:
    return Norm(
        lambda x, weight: rmsnorm.rms_norm(x, weight, EPS),
        lambda x, residual, weight: rmsnorm.add_rms_norm(x, residual, weight, EPS),
        lambda x, weight: rmsnorm.rms_norm_quantized(x, weight, EPS)[:2],
    )


def ours_out(case: Case, inputs: Inputs) -> Norm:
    out = torch.empty_like(inputs.x)
    return Norm(lambda x, weight: rmsnorm.rms_norm(x, weight, EPS, out=out))


def ours_in_place(case: Case, inputs: Inputs) -> Norm:
    return in_place(inputs, lambda x, weight: rmsnorm.rms_norm(x, weight, EPS, out=x))


def in_place(inputs: Inputs, normalize: Callable[[Tensor, Tensor], object]) -> Norm:
    """A norm that overwrites x. Only the first call, which is checked, has the weight.

    Rows that are multiplied by it again and again leave the range.
    """
    y, weights = inputs.x.clone(), [torch.ones_like(inputs.weight), inputs.weight]

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        normalize(y, weights.pop() if len(weights) > 1 else weights[0])
        return y

    return Norm(forward, differentiable=False)


def eager(case: Case, inputs: Inputs) -> Norm:
    return Norm(lambda x, weight: F.rms_norm(x, x.shape[-1:], weight, EPS))


def compiled(case: Case, inputs: Inputs) -> Norm:
    torch._dynamo.reset()

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, EPS)

    def add(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = x + residual
        return F.rms_norm(h, h.shape[-1:], weight, EPS), h

    def quantized(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return quantize(forward(x, weight))

    return Norm(
        torch.compile(forward, dynamic=False),
        torch.compile(add, dynamic=False),
        torch.compile(quantized, dynamic=False),
    )


def ours_then_compiled(case: Case, inputs: Inputs) -> Norm:
    """Our norm, and what quantises its result compiled."""
    torch._dynamo.reset()
    then = torch.compile(quantize, dynamic=False)

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return rmsnorm.rms_norm(x, weight, EPS)

    return Norm(forward, quantized=lambda x, weight: then(forward(x, weight)))


def quantize(y: Tensor) -> tuple[Tensor, Tensor]:
    """int8 with a scale for each row, as most libraries have it."""
    wide = y.float()
    scale = wide.abs().amax(-1, keepdim=True) / QMAX
    return (wide / scale.clamp_min(SMALLEST)).round().clamp(-QMAX, QMAX).to(torch.int8), scale


def layer_norm(case: Case, inputs: Inputs) -> Norm:
    bias = torch.zeros_like(inputs.weight)
    return Norm(lambda x, weight: F.layer_norm(x, x.shape[-1:], weight, bias, EPS), formula="LayerNorm")


def naive(case: Case, inputs: Inputs) -> Norm:
    """The formula in plain operations, rounded before the weight as in most models."""

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        u = x.float() if x.dtype.itemsize < 4 else x
        rstd = torch.rsqrt((u * u).mean(-1, keepdim=True) + EPS)
        return (u * rstd).to(x.dtype) * weight

    return Norm(forward)


# ---------------------------------------------------------------- of other packages


def vllm(case: Case, inputs: Inputs) -> Norm:
    ops = PEERS["vllm"].load(case.device)
    out, h, y = (torch.empty_like(inputs.x) for _ in range(3))
    if case.what == "add":
        y.copy_(inputs.x)
        h.copy_(inputs.residual)

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        ops.rms_norm(out, x, weight, EPS)
        return out

    def add(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        # In place, so that only the first call has the inputs of the others, which is the one that is checked.
        ops.fused_add_rms_norm(y, h, weight, EPS)
        return y, h

    q, scale = torch.empty(inputs.x.shape, dtype=torch.int8), torch.empty(len(inputs.x), 1)

    def quantized(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ops.rms_norm(out, x, weight, EPS)
        ops.dynamic_scaled_int8_quant(q, out, scale, None)
        return q, scale

    # Its operators for GPUs have other names.
    return Norm(forward, add, quantized if case.device == "cpu" else None, differentiable=False)


def zentorch(case: Case, inputs: Inputs) -> Norm:
    ops = PEERS["zentorch"].load(case.device)
    h, y = inputs.residual.clone(), inputs.x.clone()

    def add(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ops.zentorch_add_rms_norm_(y, weight, h, EPS)  # in place: as above
        return y, h

    return Norm(lambda x, weight: ops.zentorch_rms_norm(x, weight, EPS), add, differentiable=False)


def pace(case: Case, inputs: Inputs) -> Norm:
    ops = PEERS["pace"].load(case.device)
    if case.dtype != "bfloat16":
        raise Unavailable(f"no kernel for {case.dtype}")
    return Norm(
        lambda x, weight: ops.rmsnorm(x, weight, EPS),
        lambda x, residual, weight: ops.fused_add_rmsnorm(x, residual, weight, EPS),
        differentiable=False,
    )


def ncnn(case: Case, inputs: Inputs) -> Norm:
    PEERS["ncnn"].load(case.device)
    if case.dtype != "float32":
        raise Unavailable(f"no kernel for {case.dtype}")
    norms: dict[int, Callable[[Tensor], None]] = {}

    def normalize(x: Tensor, weight: Tensor) -> None:
        if id(weight) not in norms:
            norms[id(weight)] = ncnn_norm(weight, EPS, case.threads)
        norms[id(weight)](x)

    return in_place(inputs, normalize)


def onnxruntime(case: Case, inputs: Inputs) -> Norm:
    options = PEERS["onnxruntime"].load(case.device).SessionOptions()
    if case.dtype not in ("float32", "float16"):
        raise Unavailable(f"no kernel for {case.dtype}")
    options.intra_op_num_threads = case.threads
    # Its idle threads would spin into the turn of the contestant that comes next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    feeds = {"x": inputs.x, "residual": inputs.residual, "weight": inputs.weight}
    if case.what != "add":
        del feeds["residual"]
    session = onnx_session({name: t.dtype for name, t in feeds.items()}, EPS, options)
    outputs = {node.name: torch.empty_like(inputs.x) for node in session.get_outputs()}
    binding, kind = session.io_binding(), inputs.x.numpy().dtype
    for name, t in feeds.items():
        binding.bind_input(name, "cpu", 0, kind, tuple(t.shape), t.data_ptr())
    for name, t in outputs.items():
        binding.bind_output(name, "cpu", 0, kind, tuple(t.shape), t.data_ptr())

    def run(*tensors: Tensor) -> tuple[Any, ...]:
        session.run_with_iobinding(binding)
        return tuple(outputs.values())

    return Norm(lambda *tensors: run()[0], run, differentiable=False)


def liger(case: Case, inputs: Inputs) -> Norm:
    functions = PEERS["liger"].load(case.device)
    # In place it would write dx over dy.
    options = {"offset": 0.0, "casting_mode": "llama", "in_place": False}
    return Norm(
        lambda x, weight: functions.liger_rms_norm(x, weight, EPS, **options),
        lambda x, residual, weight: functions.liger_fused_add_rms_norm(x, residual, weight, EPS, **options),
    )


def quack(case: Case, inputs: Inputs) -> Norm:
    function = PEERS["quack"].load(case.device).rmsnorm
    return Norm(
        lambda x, weight: function(x, weight, eps=EPS),
        lambda x, residual, weight: function(x, weight, residual=residual, eps=EPS, prenorm=True),
    )


def flash_attn(case: Case, inputs: Inputs) -> Norm:
    function = PEERS["flash-attn"].load(case.device).rms_norm_fn
    return Norm(
        lambda x, weight: function(x, weight, None, eps=EPS),
        lambda x, residual, weight: function(x, weight, None, residual=residual, eps=EPS, prenorm=True),
    )


def apex(case: Case, inputs: Inputs) -> Norm:
    function = PEERS["apex"].load(case.device).fused_rms_norm_affine
    return Norm(lambda x, weight: function(x, weight, x.shape[-1:], EPS))


# ---------------------------------------------------------------- what is timed


def make_call(case: Case, inputs: Inputs, norm: Norm) -> Callable[[], tuple[Tensor, ...]]:
    """Return what is timed: the case's work by a contestant, which returns its results."""
    x, weight, residual, dy = inputs.x, inputs.weight, inputs.residual, inputs.dy
    if case.what == "forward":
        return lambda: (norm.forward(x, weight),)
    if case.what == "add":
        if norm.add is None:
            return lambda: (norm.forward(h := x + residual, weight), h)
        return lambda: norm.add(x, residual, weight)  # type: ignore[misc]  # it is not None, and nobody changes it
    if case.what == "quantized":
        if norm.quantized is None:
            return lambda: quantize(norm.forward(x, weight))
        return lambda: norm.quantized(x, weight)  # type: ignore[misc]  # as above
    if not norm.differentiable:
        raise Unavailable("forward only")
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    if case.what == "training":
        return lambda: torch.autograd.grad(norm.forward(*leaves), leaves, dy)
    # What torch.compile's backward gives back early would be missing the second time.
    with torch._functorch.config.patch(donated_buffer=False):
        y = norm.forward(*leaves)
        torch.autograd.grad(y, leaves, dy, retain_graph=True)
    return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)
