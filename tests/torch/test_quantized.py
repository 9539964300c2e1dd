"""Norms whose result is quantised: the bits of the norm and then `quantize`, which is the definition."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rmsnorm import RMSNorm, add_rms_norm, gated_rms_norm, quantize, rms_norm, rms_norm_quantized
from rmsnorm.numerics.quantization import dequantize
from rmsnorm.ops import library
from tests.support.bits import same
from tests.support.rows import DTYPES, all_rows, random_rows

ROOT = Path(__file__).parents[2]
INT8, E4M3, E5M2, E8M0 = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
WIDTH = 192
OPTIONS = [
    {},
    {"lowest": -128},
    {"dtype": E4M3},
    {"dtype": E5M2},
    {"block_size": 32},
    {"block_size": 64, "dtype": E4M3, "smallest": 1 / (448 * 512)},
    {"block_size": 96, "dtype": E5M2, "scale_ub": 1.5},
    {"scale_ub": 0.5, "smallest": torch.finfo(torch.float32).eps},
    {"scale": torch.tensor(0.01)},
    {"scale": torch.tensor(0.01), "lowest": -128},
    {"scale": torch.tensor([0.001]), "dtype": E4M3, "block_size": 32},
    {"scale_dtype": E8M0, "dtype": E4M3, "block_size": 32},
    {"scale_dtype": E8M0, "dtype": E4M3, "block_size": 32, "scale_rounding": "up"},
    {"scale_dtype": E8M0, "dtype": E5M2, "block_size": 64},
    {"scale_dtype": E8M0, "dtype": E5M2, "scale_rounding": "up"},
]
every_option = pytest.mark.parametrize("options", OPTIONS, ids=str)


def raw(t):
    """Of one byte an element, as integers; NaN of either sign are one."""
    if t.dtype in (E4M3, E5M2):
        return torch.where(t.float().isnan(), 0x7F, t.view(torch.uint8))
    return t.view(torch.uint8) if t.itemsize == 1 else t


def all_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            same(raw(a), raw(b))


def steps(x, weight, quant, **options):
    """The two steps, one after the other."""
    h = None
    if (residual := options.pop("residual", None)) is not None:
        y, h = add_rms_norm(x, residual, weight, **options)
    elif (gate := options.pop("gate", None)) is not None:
        y = gated_rms_norm(x, gate, weight, **options)
    else:
        y = rms_norm(x, weight, **options)
    q, scale, _, _ = quantize(y, **quant)
    return q, scale, y, h


def forms(x, dtype):
    second = x.flip(0)
    yield {}
    yield {"weight_offset": 1.0, "rounding": "before_scale"}
    yield {"residual": second, "sum": "exact", "alpha": 0.5}
    yield {"residual": second.float(), "rounding": "weight_dtype"}
    yield {"gate": second.to(dtype), "activation": "sigmoid"}
    yield {"gate": second, "norm_before_gate": False, "group_size": 48}
    yield {"group_size": 64}


@every_option
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_of_the_two_steps(options, dtype):
    x = all_rows(WIDTH, dtype)
    for number, form in enumerate(forms(x, dtype)):
        weight = (None, torch.linspace(-2, 3, WIDTH), torch.linspace(0.5, 1.5, WIDTH).to(dtype))[number % 3]
        expected = steps(x, weight, options, **form)
        all_same(rms_norm_quantized(x, weight, **options, **form, return_norm=True), expected)
        without = rms_norm_quantized(x, weight, **options, **form)
        all_same(without, (*expected[:2], None, expected[3]))


@every_option
def test_a_row_has_one_answer_in_any_batch_and_on_any_threads(options):
    x, weight = random_rows(257, WIDTH, torch.bfloat16, 1), torch.linspace(0.5, 1.5, WIDTH)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = rms_norm_quantized(x, weight, **options)
        torch.set_num_threads(3)
        all_same(rms_norm_quantized(x, weight, **options), whole)
    finally:
        torch.set_num_threads(threads)
    for row in (0, 5, 256):
        alone = rms_norm_quantized(x[row : row + 1], weight, **options)
        all_same(alone[:2], [t[row : row + 1] for t in whole[:2]])


def test_rows_that_lie_in_any_way():
    x = random_rows(24, 2 * WIDTH, torch.bfloat16, 1).view(4, 6, 2 * WIDTH)
    for view in (x[..., :WIDTH], x[..., ::2], x.transpose(0, 1)[..., WIDTH:], x[:1, :, :WIDTH].expand(4, 6, WIDTH)):
        found = rms_norm_quantized(view, block_size=32)
        assert found.q.is_contiguous()
        all_same(found, rms_norm_quantized(view.contiguous(), block_size=32))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_float8_is_converted_as_pytorch_does(dtype):
    """Every bfloat16 and float16, and float32 on both sides of every tie between two float8: by a norm that is x."""
    every = torch.arange(2**16).to(torch.int16)
    neighbours = torch.arange(2**8).to(torch.uint8).view(dtype).float()
    neighbours = neighbours[neighbours.isfinite()].sort().values
    ties = (neighbours[1:] + neighbours[:-1]) / 2
    near = torch.cat([ties.view(torch.int32) + d for d in (-1, 0, 1)]).view(torch.float32)
    values = torch.cat([every.view(torch.bfloat16).float(), every.view(torch.float16).float(), near, neighbours])
    values = values[values.isfinite() & (values.abs() <= torch.finfo(dtype).max)]
    values = torch.nn.functional.pad(values, (0, -len(values) % WIDTH)).view(-1, WIDTH)
    # The norm of ones is the weight.
    found = rms_norm_quantized(
        torch.ones(1, values.numel()), values.flatten(), 0.0, dtype=dtype, scale=torch.tensor(1.0)
    )
    same(raw(found.q), raw(values.flatten()[None].to(dtype)))


def test_integers_are_rounded_half_to_even_and_saturate():
    values = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 300.0, -127.5, -300.0, 0.49999997, -2.5])
    found = rms_norm_quantized(torch.ones(1, 12), values, 0.0, scale=torch.tensor(1.0)).q
    assert found.tolist() == [[0, 2, 2, 0, -2, 126, 127, 127, -127, -127, 0, -2]]
    found = rms_norm_quantized(torch.ones(1, 12), values, 0.0, scale=torch.tensor(1.0), lowest=-128).q
    assert found[0, 8:10].tolist() == [-128, -128]


@pytest.mark.parametrize("dtype", [INT8, E4M3, E5M2], ids=str)
def test_rows_of_zeros_infinities_and_nan(dtype):
    y = torch.tensor([[0.0, -0.0, 0.0, 0.0], [1.0, torch.inf, -2.0, 0.0], [1.0, torch.nan, -2.0, 0.0]])
    for scale_dtype in (torch.float32, E8M0)[: 1 + (dtype != INT8)]:
        q, scale, _, _ = quantize(y, dtype, scale_dtype=scale_dtype)
        assert (q[0].float() == 0).all()
        assert scale[0].float() == (torch.finfo(torch.float32).tiny if scale_dtype == torch.float32 else 2.0**-127)
        assert not scale[1:].float().isfinite().any()
        if dtype == INT8:
            assert q[2, 1] == 0
        assert dequantize(q, scale)[1:].isnan().all()


def test_the_formulas_of_others_by_options():
    y = random_rows(33, WIDTH, torch.bfloat16, 3).float()
    y[0] = 0
    # vLLM, dynamic per token: the largest magnitude through the largest of the dtype, not below a smallest scale.
    scale = (y.abs().amax(-1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).eps)
    q, found, _, _ = quantize(y, smallest=torch.finfo(torch.float32).eps, lowest=-128)
    same(found, scale)
    same(q, (y / scale).round().clamp(-128, 127).to(INT8))
    scale = (y.abs().amax(-1, keepdim=True) / 448).clamp(min=1 / (448 * 512))
    q, found, _, _ = quantize(y, E4M3, smallest=1 / (448 * 512))
    same(found, scale)
    same(raw(q), raw((y / scale).clamp(-448, 448).to(E4M3)))
    # OCP MX: the exponent of the largest magnitude less that of the largest float8.
    blocks = y[1:].unflatten(-1, (-1, 32))
    exponent = blocks.abs().amax(-1).log2().floor() - 8
    q, found, _, _ = quantize(y[1:], E4M3, block_size=32, scale_dtype=E8M0)
    same(found.float(), exponent.exp2())
    same(raw(q), raw((blocks / exponent.exp2()[..., None]).clamp(-448, 448).to(E4M3).flatten(-2)))
    _, up, _, _ = quantize(y[1:], E4M3, block_size=32, scale_dtype=E8M0, scale_rounding="up")
    least = blocks.abs().amax(-1) / 448
    assert ((up.float() >= least) & (up.float() < 2 * least)).all()


def test_the_consumers_of_pytorch_take_the_results():
    x, w = random_rows(32, 64, torch.float32, 1), random_rows(48, 64, torch.float32, 2)
    q, scale, _, _ = rms_norm_quantized(x)
    wq, wscale, _, _ = quantize(w)
    found = torch._int_mm(q, wq.t()).float() * scale * wscale.t()
    same(torch._int_mm(q, wq.t()), (q.int() @ wq.int().t()).int())
    expected = rms_norm(x) @ w.t()
    # Each of 64 products has two factors that are off by half a step of 1/127 of their rows' largest.
    bound = 64 * (rms_norm(x).abs().amax() * w.abs().amax()) * (1 / 127 + 1 / (4 * 127**2))
    assert (found - expected).abs().max() < bound
    q, scale, _, _ = rms_norm_quantized(x, dtype=E4M3)
    wq, wscale, _, _ = quantize(w, E4M3)
    result = torch._scaled_mm(q, wq.t(), scale_a=scale, scale_b=wscale.t().contiguous(), out_dtype=torch.float32)
    assert result.shape == (32, 48)


def test_gradients_are_refused_or_go_straight_through():
    x, weight = random_rows(5, WIDTH, torch.float32, 1).requires_grad_(), torch.ones(WIDTH, requires_grad=True)
    with pytest.raises(RuntimeError, match="straight_through"):
        rms_norm_quantized(x, weight)
    with torch.no_grad():
        q, scale, _, _ = rms_norm_quantized(x, weight)
    found = rms_norm_quantized(x, weight, straight_through=True)
    same(found.norm.detach(), dequantize(q, scale))
    same(found.q, q)
    dy = random_rows(5, WIDTH, torch.float32, 2)
    for a, b in zip(
        torch.autograd.grad(found.norm, (x, weight), dy),
        torch.autograd.grad(rms_norm(x, weight), (x, weight), dy),
        strict=True,
    ):
        same(a, b)


def test_compiled_meta_and_transforms():
    x, weight = random_rows(6, WIDTH, torch.bfloat16, 1), torch.linspace(0.5, 1.5, WIDTH)
    expected = rms_norm_quantized(x, weight, block_size=32)
    torch._dynamo.reset()
    compiled = torch.compile(rms_norm_quantized, backend="aot_eager", fullgraph=True)
    all_same(compiled(x, weight, block_size=32), expected)
    meta = rms_norm_quantized(x.to("meta"), weight.to("meta"), block_size=32)
    assert [(t.shape, t.dtype) for t in meta[:2]] == [(t.shape, t.dtype) for t in expected[:2]]
    rows = torch.func.vmap(lambda x: rms_norm_quantized(x, weight, block_size=32)[:2])(x)
    all_same(rows, expected[:2])
    double = rms_norm_quantized(x.double(), weight)
    all_same(double[:2], quantize(rms_norm(x.double(), weight))[:2])


def test_a_module():
    norm = RMSNorm(WIDTH, quantize={"dtype": E4M3, "block_size": 64})
    x = random_rows(3, WIDTH, torch.bfloat16, 1)
    with torch.no_grad():
        all_same(norm(x), rms_norm_quantized(x, norm.weight, dtype=E4M3, block_size=64))
        all_same(norm(x, x), rms_norm_quantized(x, norm.weight, dtype=E4M3, block_size=64, residual=x))
    assert "quantize" in repr(norm)
    assert norm.state_dict().keys() == {"weight"}
    with pytest.raises(ValueError, match="dtype"):
        RMSNorm(8, quantize={"dtype": torch.int16})
    with pytest.raises(TypeError, match="quantize"):
        RMSNorm(8, quantize="int8")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dtype": torch.int16}, "dtype must be one of int8"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"block_size": 7}, "block_size must divide the last dimension 192"),
        ({"block_size": 0}, "block_size must be a positive integer"),
        ({"block_size": 1.5}, "block_size must be a positive integer"),
        ({"scale": 0.5}, "scale must be a float32 tensor"),
        ({"scale": torch.ones(3)}, "scale must have one element, or broadcast"),
        ({"scale": torch.ones(1, dtype=torch.float64)}, "scale must be a float32 tensor, got torch.float64"),
        ({"scale": torch.ones(1, device="meta")}, "scale must be on the device"),
        ({"scale": torch.ones(1), "scale_ub": 1.0}, "scale is given"),
        ({"scale_dtype": torch.bfloat16}, "scale_dtype must be float32 or float8_e8m0fnu"),
        ({"scale_dtype": E8M0}, "goes with float8 results"),
        ({"scale_dtype": E8M0, "dtype": E4M3, "scale_ub": 1.0}, "scale_ub is of float32 scales"),
        ({"scale_rounding": "up"}, "scale_rounding is of E8M0 scales"),
        ({"scale_rounding": "nearest"}, "scale_rounding must be 'down' or 'up'"),
        ({"scale_ub": 0.0}, "scale_ub must be positive"),
        ({"scale_ub": float("nan")}, "scale_ub must be a finite number"),
        ({"smallest": -1.0}, "smallest must be positive"),
        ({"lowest": -126}, "lowest must be -127 or -128"),
    ],
    ids=str,
)
def test_what_is_refused_says_why(options, match):
    for call in (quantize, rms_norm_quantized):
        with pytest.raises((ValueError, TypeError), match=match):
            call(torch.ones(2, WIDTH), **options)


def test_what_does_not_go_together():
    x = torch.ones(2, WIDTH)
    for options, match in (
        ({"residual": x, "gate": x}, "residual and gate"),
        ({"return_norm": True, "straight_through": True}, "return_norm and straight_through"),
        ({"residual": x[:1]}, "residual must have x's shape"),
        ({"gate": x[:, :3]}, "gate must have x's shape"),
        ({"weight": torch.ones(3)}, "weight must have shape"),
        ({"rounding": "never"}, "rounding must be one of"),
    ):
        with pytest.raises(ValueError, match=match):
            rms_norm_quantized(x, **options)


@pytest.mark.parametrize("isa", library.status().isas)
def test_every_instruction_set(isa):
    """Some of the cases above by each; which one is chosen once for each process."""
    environment = {**os.environ, "RMSNORM_ISA": isa}
    process = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert process.stdout.strip() == "the same", process.stderr


SCRIPT = """
import torch
from tests.torch.test_quantized import OPTIONS, WIDTH, all_same, forms, steps
from tests.support.rows import DTYPES, all_rows
from rmsnorm import rms_norm_quantized
for dtype in DTYPES:
    x = all_rows(WIDTH, dtype)
    for options in OPTIONS:
        for form in list(forms(x, dtype))[::3]:
            all_same(rms_norm_quantized(x, None, **options, **form, return_norm=True), steps(x, None, options, **form))
print("the same")
"""
