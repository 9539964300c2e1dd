"""Other people's compiled kernels, as functions that are called like a norm."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rmsnorm.benchmarking.peers import PEERS, ncnn_norm, onnx_session


def flash_attn() -> Callable[..., Tensor]:
    function = PEERS["flash-attn"].load().rms_norm_fn

    def rms_norm_fn(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return function(x, weight, None, eps=eps)  # type: ignore[no-any-return]

    return rms_norm_fn


def vllm() -> Callable[..., Tensor]:
    ops = PEERS["vllm"].load()

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        ops.rms_norm(out, x, weight, eps)
        return out

    return rms_norm


def vllm_add() -> Callable[..., None]:
    ops = PEERS["vllm"].load()

    def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        ops.fused_add_rms_norm(x, residual, weight, eps)

    return fused_add_rms_norm


def vllm_int8() -> Callable[..., tuple[Tensor, Tensor]]:
    ops = PEERS["vllm"].load()

    def int8(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y, q = torch.empty_like(x), torch.empty(x.shape, dtype=torch.int8)
        scale = torch.empty(x.numel() // x.shape[-1], 1)
        ops.rms_norm(y, x, weight, eps)
        ops.dynamic_scaled_int8_quant(q, y, scale, None)
        return q, scale

    return int8


def zentorch_gated() -> Callable[..., Tensor]:
    ops = PEERS["zentorch"].load()

    def gdn_rms_norm_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, gates = (t.reshape(-1, x.shape[-1]) for t in (x, gate))
        return ops.gdn_rms_norm_gated(rows, weight, gates, eps, "silu").view(x.shape)  # type: ignore[no-any-return]

    return gdn_rms_norm_gated


def pace() -> Callable[..., Tensor]:
    ops = PEERS["pace"].load()

    def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return ops.rmsnorm(x, weight, eps)  # type: ignore[no-any-return]

    return rmsnorm


def pace_add() -> Callable[..., tuple[Tensor, Tensor]]:
    ops = PEERS["pace"].load()

    def fused_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return ops.fused_add_rmsnorm(x, residual, weight, eps)  # type: ignore[no-any-return]

    return fused_add_rmsnorm


def ncnn() -> Callable[..., Tensor]:
    PEERS["ncnn"].load()

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype != torch.float32 or weight.dtype != torch.float32:
            raise TypeError(f"x and weight must be float32, got dtypes {x.dtype} and {weight.dtype}")
        rows = x.detach().reshape(-1, x.shape[-1]).clone(memory_format=torch.contiguous_format)
        if rows.numel():
            ncnn_norm(weight, eps, torch.get_num_threads())(rows)
        return rows.view(x.shape)

    return rms_norm


def zentorch_add() -> Callable[..., tuple[Tensor, Tensor]]:
    ops = PEERS["zentorch"].load()

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y, h = (t.reshape(-1, x.shape[-1]).clone(memory_format=torch.contiguous_format) for t in (x, residual))
        ops.zentorch_add_rms_norm_(y, weight, h, eps)  # in place, y and h
        return y.view(x.shape), h.view(x.shape)

    return add_rms_norm


def zentorch() -> Callable[..., Tensor]:
    ops = PEERS["zentorch"].load()

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # Of other than two dimensions it reads and writes memory that is not its own.
        rows = x.reshape(-1, x.shape[-1])
        return ops.zentorch_rms_norm(rows, weight, eps).view(x.shape)  # type: ignore[no-any-return]

    return rms_norm


def onnxruntime() -> Callable[..., Tensor]:
    options = PEERS["onnxruntime"].load().SessionOptions()
    options.log_severity_level = 4  # what it refuses is told by its exception

    @functools.cache
    def session(x: torch.dtype, weight: torch.dtype, eps: float) -> Any:
        return onnx_session({"x": x, "weight": weight}, eps, options)

    def simplified_layer_normalization(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        given = {"x": x.detach().numpy(), "weight": weight.detach().numpy()}
        return torch.from_numpy(session(x.dtype, weight.dtype, eps).run(None, given)[0])

    return simplified_layer_normalization


def onnxruntime_add() -> Callable[..., tuple[Tensor, ...]]:
    options = PEERS["onnxruntime"].load().SessionOptions()
    options.log_severity_level = 4

    @functools.cache
    def session(x: torch.dtype, residual: torch.dtype, weight: torch.dtype, eps: float) -> Any:
        return onnx_session({"x": x, "residual": residual, "weight": weight}, eps, options)

    def skip_simplified_layer_normalization(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, ...]:
        given = {"x": x, "residual": residual, "weight": weight}
        arrays = {name: t.detach().numpy() for name, t in given.items()}
        return tuple(map(torch.from_numpy, session(x.dtype, residual.dtype, weight.dtype, eps).run(None, arrays)))

    return skip_simplified_layer_normalization
