"""The RMSNorms known by name: where each is found, and what it does not promise."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import rmsnorm
from rmsnorm.benchmarking.peers import PEERS
from rmsnorm.conformance import kernels
from rmsnorm.conformance.calling import understand
from rmsnorm.conformance.implementation import CannotCheck, Implementation, described


@dataclass(frozen=True)
class Named:
    """One known RMSNorm.

    Args:
        what: where it is found, for the report.
        load: makes or imports the callable.
        peer: the package that it is of, a key of PEERS.
        trains, compiled, promises: as of Implementation.
    """

    what: str
    load: Callable[[], Any]
    peer: str = "torch"
    trains: bool = True
    compiled: bool = False
    promises: frozenset[str] = frozenset()


def load(name: str) -> Implementation:
    """The implementation of a known name.

    Raises:
        CannotCheck: it is not installed, or does not load here.
    """
    entry = NAMES[name]
    peer = PEERS[entry.peer]
    if missing := peer.missing():
        raise CannotCheck(f"{name} is {entry.what}, and {missing} is not installed")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target = entry.load()
    except (Exception, SystemExit) as error:
        raise CannotCheck(f"{name}: {entry.what} does not load here: {described(error)}") from None
    implementation = understand(target, name)
    return replace(
        implementation,
        source=f"{entry.what}, {peer.distribution} {peer.version()}",
        trains=entry.trains,
        compiled=entry.compiled,
        promises=entry.promises,
    )


def _at(path: str) -> Callable[[], Any]:
    module, _, name = path.partition(":")
    return lambda: getattr(importlib.import_module(module), name)


def _torch_compile() -> Callable[..., Tensor]:
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)

    return torch.compile(rms_norm, dynamic=True)


def _ours(rounding: str) -> Callable[..., Tensor]:
    def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, weight_offset: float = 0.0) -> Tensor:
        return rmsnorm.rms_norm(x, weight, eps, weight_offset=weight_offset, rounding=rounding)

    return rms_norm


def _ours_gemma() -> Callable[..., nn.Module]:
    return functools.partial(rmsnorm.RMSNorm, weight_offset=1.0)


def _ours_exact() -> Callable[..., Any]:
    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Any:
        return rmsnorm.add_rms_norm(x, residual, weight, eps, sum="exact")

    return add_rms_norm


_TRANSFORMERS = "transformers.models"
NAMES = {
    "rmsnorm": Named("rmsnorm.rms_norm", lambda: rmsnorm.rms_norm, "rmsnorm", promises=frozenset({"all"})),
    "rmsnorm-module": Named("rmsnorm.RMSNorm", lambda: rmsnorm.RMSNorm, "rmsnorm", promises=frozenset({"all"})),
    "rmsnorm-llama": Named(
        'rmsnorm.rms_norm, rounding="before_scale"',
        lambda: _ours("before_scale"),
        "rmsnorm",
        promises=frozenset({"all"}),
    ),
    "rmsnorm-t5": Named(
        'rmsnorm.rms_norm, rounding="weight_dtype"',
        lambda: _ours("weight_dtype"),
        "rmsnorm",
        promises=frozenset({"all"}),
    ),
    "rmsnorm-gemma": Named("rmsnorm.RMSNorm, weight_offset=1", _ours_gemma, "rmsnorm", promises=frozenset({"all"})),
    "rmsnorm-add": Named("rmsnorm.add_rms_norm", lambda: rmsnorm.add_rms_norm, "rmsnorm", promises=frozenset({"all"})),
    "rmsnorm-add-exact": Named(
        'rmsnorm.add_rms_norm, sum="exact"', _ours_exact, "rmsnorm", promises=frozenset({"all"})
    ),
    "rmsnorm-gated": Named(
        "rmsnorm.gated_rms_norm", lambda: rmsnorm.gated_rms_norm, "rmsnorm", promises=frozenset({"all"})
    ),
    "torch": Named("torch.nn.functional.rms_norm", lambda: torch.nn.functional.rms_norm),
    "torch-module": Named("torch.nn.RMSNorm", lambda: torch.nn.RMSNorm),
    "torch-compile": Named("torch.compile of torch.nn.functional.rms_norm", _torch_compile, compiled=True),
    "transformers-llama": Named(
        "LlamaRMSNorm", _at(f"{_TRANSFORMERS}.llama.modeling_llama:LlamaRMSNorm"), "transformers"
    ),
    "transformers-gemma": Named(
        "GemmaRMSNorm", _at(f"{_TRANSFORMERS}.gemma.modeling_gemma:GemmaRMSNorm"), "transformers"
    ),
    "transformers-t5": Named("T5LayerNorm", _at(f"{_TRANSFORMERS}.t5.modeling_t5:T5LayerNorm"), "transformers"),
    "transformers-mamba2": Named(
        "MambaRMSNormGated", _at(f"{_TRANSFORMERS}.mamba2.modeling_mamba2:MambaRMSNormGated"), "transformers"
    ),
    "transformers-qwen3-next": Named(
        "Qwen3NextRMSNormGated",
        _at(f"{_TRANSFORMERS}.qwen3_next.modeling_qwen3_next:Qwen3NextRMSNormGated"),
        "transformers",
    ),
    "litgpt": Named("litgpt.model.RMSNorm", _at("litgpt.model:RMSNorm"), "litgpt"),
    "torchtune": Named("torchtune.modules.RMSNorm", _at("torchtune.modules.rms_norm:RMSNorm"), "torchtune"),
    "timm": Named("timm.layers.RmsNorm", _at("timm.layers:RmsNorm"), "timm"),
    "diffusers": Named(
        "diffusers.models.normalization.RMSNorm",
        _at("diffusers.models.normalization:RMSNorm"),
        "diffusers",
    ),
    "x-transformers": Named("x_transformers.RMSNorm", _at("x_transformers.x_transformers:RMSNorm"), "x-transformers"),
    "liger": Named("LigerRMSNorm", _at("liger_kernel.transformers.rms_norm:LigerRMSNorm"), "liger"),
    "apex": Named("apex.normalization.FusedRMSNorm", lambda: PEERS["apex"].load().FusedRMSNorm, "apex"),
    "quack": Named("quack.rmsnorm", lambda: PEERS["quack"].load().rmsnorm, "quack"),
    "flash-attn": Named("flash_attn rms_norm_fn", kernels.flash_attn, "flash-attn"),
    "vllm": Named("vLLM's compiled rms_norm", kernels.vllm, "vllm", trains=False),
    "vllm-add": Named("vLLM's compiled fused_add_rms_norm", kernels.vllm_add, "vllm", trains=False),
    "vllm-int8": Named(
        "vLLM's compiled rms_norm, then its dynamic_scaled_int8_quant", kernels.vllm_int8, "vllm", trains=False
    ),
    "zentorch": Named("zentorch_rms_norm, given two dimensions", kernels.zentorch, "zentorch", trains=False),
    "zentorch-add": Named(
        "zentorch_add_rms_norm_, given two dimensions", kernels.zentorch_add, "zentorch", trains=False
    ),
    "zentorch-gated": Named(
        "gdn_rms_norm_gated, given two dimensions", kernels.zentorch_gated, "zentorch", trains=False
    ),
    "pace": Named("PACE's compiled rmsnorm", kernels.pace, "pace", trains=False),
    "pace-add": Named("PACE's compiled fused_add_rmsnorm", kernels.pace_add, "pace", trains=False),
    "ncnn": Named("ncnn's RMSNorm, on a copy of two dimensions", kernels.ncnn, "ncnn", trains=False, compiled=True),
    "onnxruntime": Named(
        "SimplifiedLayerNormalization", kernels.onnxruntime, "onnxruntime", trains=False, compiled=True
    ),
    "onnxruntime-add": Named(
        "SkipSimplifiedLayerNormalization", kernels.onnxruntime_add, "onnxruntime", trains=False, compiled=True
    ),
}
