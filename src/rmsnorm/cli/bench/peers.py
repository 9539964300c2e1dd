"""The kernels of other packages. Each maker says why it cannot run, or imports the package."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rmsnorm.cli.bench.contestants import Norm, Unavailable
from rmsnorm.cli.bench.shapes import Case
from rmsnorm.cli.bench.tensors import EPS, Inputs


def liger(case: Case, inputs: Inputs) -> Norm:
    _needs(case, "liger_kernel", gpu=True)
    from liger_kernel.transformers import functional

    # In place it would write dx over dy.
    options = {"offset": 0.0, "casting_mode": "llama", "in_place": False}
    return Norm(
        lambda x, weight: functional.liger_rms_norm(x, weight, EPS, **options),
        lambda x, residual, weight: functional.liger_fused_add_rms_norm(x, residual, weight, EPS, **options),
    )


def quack(case: Case, inputs: Inputs) -> Norm:
    _needs(case, "quack", gpu=True)
    from quack import rmsnorm

    return Norm(
        lambda x, weight: rmsnorm(x, weight, eps=EPS),
        lambda x, residual, weight: rmsnorm(x, weight, residual=residual, eps=EPS, prenorm=True),
    )


def flash_attn(case: Case, inputs: Inputs) -> Norm:
    _needs(case, "flash_attn", gpu=True)
    from flash_attn.ops.triton.layer_norm import rms_norm_fn

    return Norm(
        lambda x, weight: rms_norm_fn(x, weight, None, eps=EPS),
        lambda x, residual, weight: rms_norm_fn(x, weight, None, residual=residual, eps=EPS, prenorm=True),
    )


def apex(case: Case, inputs: Inputs) -> Norm:
    # PyPI's apex is another package: NVIDIA's has these kernels.
    _needs(case, "fused_layer_norm_cuda", gpu=True)
    from apex.normalization.fused_layer_norm import fused_rms_norm_affine

    return Norm(lambda x, weight: fused_rms_norm_affine(x, weight, x.shape[-1:], EPS))


def vllm(case: Case, inputs: Inputs) -> Norm:
    # Importing vllm takes many seconds and is not needed for its kernels.
    _load_library("vllm", "_C.abi3.so")
    ops = torch.ops._C
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

    return Norm(forward, add, differentiable=False)


def zentorch(case: Case, inputs: Inputs) -> Norm:
    _needs(case, "zentorch", gpu=False)
    _load_library("zentorch", "libzentorch.so")
    ops = torch.ops.zentorch
    h, y = inputs.residual.clone(), inputs.x.clone()

    def add(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ops.zentorch_add_rms_norm_(y, weight, h, EPS)  # in place: as above
        return y, h

    return Norm(lambda x, weight: ops.zentorch_rms_norm(x, weight, EPS), add, differentiable=False)


def onnxruntime(case: Case, inputs: Inputs) -> Norm:
    _needs(case, "onnxruntime", gpu=False)
    _needs(case, "onnx", gpu=False)
    if case.dtype not in ("float32", "float16"):
        raise Unavailable(f"no kernel for {case.dtype}")
    feeds = {"x": inputs.x, "weight": inputs.weight}
    if case.what == "add":
        feeds["residual"] = inputs.residual
    session, binding, outputs = _onnx_session(case, feeds)

    def run(*tensors: Tensor) -> tuple[Any, ...]:
        session.run_with_iobinding(binding)
        return outputs

    return Norm(lambda *tensors: run()[0], run, differentiable=False)


def _onnx_session(case: Case, feeds: dict[str, Tensor]) -> tuple[Any, Any, tuple[Tensor, ...]]:
    """A model of one node, and inputs and outputs that are tensors of PyTorch."""
    import onnxruntime as ort
    from onnx import TensorProto, helper

    kind = getattr(TensorProto, case.dtype.upper().replace("FLOAT32", "FLOAT"))
    if case.what == "add":
        node = helper.make_node(
            "SkipSimplifiedLayerNormalization",
            ["x", "residual", "weight"],
            ["y", "", "", "h"],
            domain="com.microsoft",
            epsilon=EPS,
        )
    else:
        node = helper.make_node("SimplifiedLayerNormalization", ["x", "weight"], ["y"], epsilon=EPS, axis=-1)
    outputs = {name: torch.empty_like(feeds["x"]) for name in node.output if name}
    values = {name: helper.make_tensor_value_info(name, kind, tuple(t.shape)) for name, t in (feeds | outputs).items()}
    graph = helper.make_graph([node], "norm", [values[name] for name in feeds], [values[name] for name in outputs])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    options = ort.SessionOptions()
    options.intra_op_num_threads = case.threads
    # Its idle threads would spin into the turn of the contestant that comes next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for name, t in feeds.items():
        binding.bind_input(name, "cpu", 0, kind, tuple(t.shape), t.data_ptr())
    for name, t in outputs.items():
        binding.bind_output(name, "cpu", 0, kind, tuple(t.shape), t.data_ptr())
    return session, binding, tuple(outputs.values())


def _needs(case: Case, package: str, *, gpu: bool) -> None:
    on_gpu = case.device != "cpu"
    if gpu and not on_gpu:
        raise Unavailable("runs on GPUs only")
    if on_gpu and not gpu:
        raise Unavailable("runs on the CPU only")
    if importlib.util.find_spec(package) is None:
        raise Unavailable("not installed")


_loaded: set[str] = set()


def _load_library(package: str, file: str) -> None:
    """Load the operators of a package without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        raise Unavailable("not installed")
    if package in _loaded:
        return
    paths = [Path(folder) / file for folder in spec.submodule_search_locations]
    found = next((path for path in paths if path.is_file()), None)
    if found is None:
        raise Unavailable(f"this installation has no {file}")
    torch.ops.load_library(str(found))
    _loaded.add(package)


MAKERS: dict[str, Callable[[Case, Inputs], Norm]] = {
    "vllm": vllm,
    "zentorch": zentorch,
    "onnxruntime": onnxruntime,
    "liger": liger,
    "quack": quack,
    "flash-attn": flash_attn,
    "apex": apex,
}
