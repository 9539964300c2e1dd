"""Norms whose result is quantised, right ones and faulty ones."""

import torch

import rmsnorm
from tests.conformance.faulty.formula import right

_QMAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def _norm(x, weight, eps):
    return right(x, weight, eps).float()


def _amax(y):
    return y.abs().amax(-1, keepdim=True)


def _quantize(y, dtype=torch.int8, amax=_amax, smallest=1e-10, convert=None):
    qmax = _QMAX[dtype]
    scale = (amax(y) / qmax).clamp_min(smallest)
    quotient = y / scale
    if convert is not None:
        return convert(quotient), scale
    return (quotient.round() if dtype == torch.int8 else quotient).clamp(-qmax, qmax).to(dtype), scale


def int8(x, weight, eps=1e-6):
    return _quantize(_norm(x, weight, eps))


def e4m3(x, weight, eps=1e-6):
    return _quantize(_norm(x, weight, eps), torch.float8_e4m3fn)


def e5m2(x, weight, eps=1e-6):
    return _quantize(_norm(x, weight, eps), torch.float8_e5m2)


def blocks_of_32(x, weight, eps=1e-6):
    if x.shape[-1] % 32:
        raise ValueError("the width must be a multiple of 32")
    q, scale = _quantize(_norm(x, weight, eps).unflatten(-1, (-1, 32)))
    return q.flatten(-2), scale.squeeze(-1)


def powers_of_two(x, weight, eps=1e-6):
    """A scale of E8M0 for each block of 32, as OCP MX has it."""
    if x.shape[-1] % 32:
        raise ValueError("the width must be a multiple of 32")
    y = _norm(x, weight, eps).unflatten(-1, (-1, 32))
    scale = 2.0 ** (_amax(y).clamp_min(2.0**-100).log2().floor() - 8)
    scale = torch.where(y.isnan().any(-1, keepdim=True), torch.nan, scale)
    q = (y / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return q.flatten(-2), scale.squeeze(-1).to(torch.float8_e8m0fnu)


def without_gradients(x, weight, eps=1e-6):
    if torch.is_grad_enabled():
        raise RuntimeError("a quantised result has no gradient: call under torch.no_grad()")
    return int8(x, weight, eps)


def twice_the_power_of_two(x, weight, eps=1e-6):
    q, scale = powers_of_two(x, weight, eps)
    return (q.float() / 4).to(q.dtype), (scale.float() * 4).to(scale.dtype)


def ours_in_blocks_of_64(x, weight, eps=1e-6):
    return rmsnorm.rms_norm_quantized(x, weight, eps, dtype=torch.float8_e4m3fn, block_size=64)


def ours_by_powers_of_two(x, weight, eps=1e-6):
    options = {"dtype": torch.float8_e5m2, "block_size": 32, "scale_dtype": torch.float8_e8m0fnu}
    return rmsnorm.rms_norm_quantized(x, weight, eps, **options)


def exact_norm(x, weight, eps=1e-6):
    """y is not rounded to 16 bits before."""
    return _quantize(right(x.double(), weight, eps).float())


def largest_of_all_but_the_tail(x, weight, eps=1e-6):
    y = _norm(x, weight, eps)
    return _quantize(y, amax=lambda y: _amax(y[..., :-1]))


def largest_without_a_sign(x, weight, eps=1e-6):
    return _quantize(_norm(x, weight, eps), amax=lambda y: y.amax(-1, keepdim=True))


def one_scale_for_all_rows(x, weight, eps=1e-6):
    return _quantize(_norm(x, weight, eps), amax=lambda y: _amax(y).amax().expand(len(y), 1))


def half_away_from_zero(x, weight, eps=1e-6):
    def convert(t):
        return (t.sign() * (t.abs() + 0.5).floor()).clamp(-127, 127).to(torch.int8)

    return _quantize(_norm(x, weight, eps), convert=convert)


def cut_off(x, weight, eps=1e-6):
    return _quantize(_norm(x, weight, eps), convert=lambda t: t.trunc().clamp(-127, 127).to(torch.int8))


def beyond_the_largest_float8(x, weight, eps=1e-6):
    def amax(y):
        return _amax(y) * (57344 / 65000)

    return _quantize(_norm(x, weight, eps), torch.float8_e5m2, amax, convert=lambda t: t.to(torch.float8_e5m2))


def zero_by_zero(x, weight, eps=1e-6):
    return _quantize(_norm(x, weight, eps), torch.float8_e4m3fn, smallest=0.0)


def nan_is_zero(x, weight, eps=1e-6):
    return _quantize(_norm(x, weight, eps).nan_to_num(nan=0.0))
