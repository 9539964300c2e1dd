"""`torch.export`, ONNX files run in onnxruntime, AOTInductor packages."""

import ctypes
import logging

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from rmsnorm import RMSNorm, add_rms_norm, rms_norm
from rmsnorm.spec import ROUNDINGS

DIM = 64
DYNAMIC = {0: torch.export.Dim("batch", min=2, max=1024), 1: torch.export.Dim("sequence", min=2, max=4096)}
# PyTorch's own: of ONNX operators whose package is not installed, and of what onnxscript imports.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def quiet_exporter():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


class Function(torch.nn.Module):
    """A function as a module, which is what exporters take."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def random_norm(dtype=torch.float32, **options):
    norm = RMSNorm(DIM, **options).to(dtype).eval().requires_grad_(False)
    norm.weight.normal_(generator=torch.Generator().manual_seed(1))
    return norm


def relative_error(actual, expected):
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).abs() / expected.abs().clamp_min(1e-30)).max().item()


def float32_bound(dim):
    # A sum of squares of `dim` terms in any order is off by dim roundings at most and its root by half of them; mean,
    # eps, root, quotient and product round once each. Two such results may differ by twice that.
    return 2 * (dim / 2 + 5) * 2.0**-24


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("options", [{}, {"rounding": "before_scale"}, {"weight_offset": 1.0}])
def test_exported_program_is_core_aten_with_dynamic_batch_and_sequence(strict, options):
    norm = random_norm(**options)
    program = torch.export.export(norm, (torch.randn(4, 5, DIM),), dynamic_shapes=(DYNAMIC,), strict=strict)
    for shape in ((2, 2), (33, 7), (9, 1000)):
        x = torch.randn(*shape, DIM)
        assert relative_error(program.module()(x), norm(x)) < float32_bound(DIM)
    core = program.run_decompositions().graph.nodes
    assert all(torch.Tag.core in node.target.tags for node in core if node.op == "call_function")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_exported_programs_keep_dtype_and_rounding(dtype, rounding):
    norm, x = random_norm(torch.float32, rounding=rounding), torch.randn(3, 5, DIM).to(dtype)
    y = torch.export.export(norm, (x,)).module()(x)
    assert y.dtype == norm(x).dtype
    # The results before rounding differ by less than float32_bound: after one rounding by one unit in the last place,
    # and after two by one in x_hat, which the product may make two.
    assert relative_error(y, norm(x)) <= 2 * torch.finfo(dtype).eps + float32_bound(DIM)


def test_a_fused_residual_exports():
    function = Function(lambda x, residual: add_rms_norm(x, residual, None))
    x, residual = torch.randn(4, DIM), torch.randn(4, DIM)
    y, h = torch.export.export(function, (x, residual)).module()(x, residual)
    assert torch.equal(h, x + residual)
    assert relative_error(y, rms_norm(h)) < float32_bound(DIM)


def test_a_training_graph_exports():
    program = torch.export.export(RMSNorm(DIM).train(), (torch.randn(4, DIM),))
    program.module()(torch.randn(4, DIM)).sum().backward()


# ---------------------------------------------------------------- ONNX


def onnx_program(module, inputs, **options):
    return torch.onnx.export(module, inputs, dynamo=True, opset_version=23, verbose=False, **options)


def run_in_onnxruntime(program, *inputs):
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    if inputs[0].dtype != torch.bfloat16:
        names = [i.name for i in session.get_inputs()]
        return torch.from_numpy(session.run(None, dict(zip(names, (t.numpy() for t in inputs), strict=True)))[0])
    # numpy has no bfloat16: its bits travel as int16.
    given = {
        i.name: onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
            t.view(torch.int16).numpy(), onnx.TensorProto.BFLOAT16
        )
        for i, t in zip(session.get_inputs(), inputs, strict=True)
    }
    result = session.run_with_ort_values(None, given)[0]
    bits = (ctypes.c_int16 * int(np.prod(result.shape()))).from_address(result.data_ptr())
    return torch.tensor(np.array(bits)).view(torch.bfloat16).view(result.shape())


def operators(program):
    return [node.op_type for node in program.model.graph]


@pytest.mark.parametrize("options", [{}, {"rounding": "before_scale"}, {"weight_offset": 1.0}])
def test_float32_is_the_standard_operator(options):
    norm = random_norm(**options)
    program = onnx_program(norm, (torch.randn(4, 5, DIM),), dynamic_shapes=(DYNAMIC,))
    assert operators(program) == ["RMSNormalization"]
    x = torch.randn(7, 9, DIM)
    assert relative_error(run_in_onnxruntime(program, x), norm(x)) < float32_bound(DIM)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_sixteen_bits_are_spelled_out_with_the_rounding_asked_for(dtype, rounding):
    norm = random_norm(dtype, rounding=rounding)
    program = onnx_program(norm, (torch.randn(4, 5, DIM).to(dtype),), dynamic_shapes=(DYNAMIC,))
    assert "RMSNormalization" not in operators(program)
    x = torch.randn(7, 9, DIM).to(dtype)
    y, expected = run_in_onnxruntime(program, x), norm(x)
    assert relative_error(y, expected) <= 2 * torch.finfo(dtype).eps
    # Another convention would differ in far more than the few elements that lie on the edge between two roundings.
    assert (y != expected).float().mean() < 0.01


def test_an_older_opset_gets_a_decomposition():
    norm, x = random_norm(), torch.randn(4, DIM)
    program = torch.onnx.export(norm, (x,), dynamo=True, opset_version=18, verbose=False)
    assert "RMSNormalization" not in operators(program)
    assert relative_error(run_in_onnxruntime(program, x), norm(x)) < float32_bound(DIM)


def cases_of_the_onnx_package():
    """(name, x, weight, eps, y) of every test that the standard has for RMSNormalization."""
    from onnx.backend.test.case.node import rmsnormalization

    cases = []

    def record(node, inputs, outputs, name):
        eps = next((a.f for a in node.attribute if a.name == "epsilon"), 1e-5)
        cases.append((name, *(torch.from_numpy(a) for a in inputs), eps, torch.from_numpy(outputs[0])))

    original, rmsnormalization.expect = rmsnormalization.expect, record
    state = np.random.get_state()
    np.random.seed(0)
    try:
        for name in dir(rmsnormalization.RMSNormalization):
            if name.startswith("export"):
                getattr(rmsnormalization.RMSNormalization, name)()
    finally:
        rmsnormalization.expect = original
        np.random.set_state(state)
    return cases


def test_the_standards_own_cases():
    cases = cases_of_the_onnx_package()
    assert len(cases) > 10
    for name, x, weight, eps, y in cases:
        assert relative_error(rms_norm(x, weight, eps), y) < float32_bound(weight.numel()), name


def test_the_standards_own_cases_exported_and_run():
    for name, x, weight, eps, y in cases_of_the_onnx_package():
        if "4d" in name:
            continue
        function = Function(lambda x, weight, eps=eps: rms_norm(x, weight, eps)).eval()
        program = onnx_program(function, (x, weight))
        assert "RMSNormalization" in operators(program), name
        assert relative_error(run_in_onnxruntime(program, x, weight), y) < float32_bound(weight.numel()), name


# ---------------------------------------------------------------- AOTInductor


def test_an_aotinductor_package_loads_and_runs(tmp_path):
    norm = random_norm()
    program = torch.export.export(norm, (torch.randn(4, 5, DIM),), dynamic_shapes=(DYNAMIC,))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "norm.pt2"))
    run = torch._inductor.aoti_load_package(package)
    x = torch.randn(9, 3, DIM)
    assert relative_error(run(x), norm(x)) < float32_bound(DIM)
