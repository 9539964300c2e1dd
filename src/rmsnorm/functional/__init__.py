"""The public functions, a file each; fast_path.py says how a call goes."""

from rmsnorm.functional.closing import rms_norm_add, rms_norm_add_rms_norm
from rmsnorm.functional.gated import gated_rms_norm
from rmsnorm.functional.modulated import modulated_rms_norm
from rmsnorm.functional.plain import rms_norm
from rmsnorm.functional.quantized import Quantized, quantize, rms_norm_quantized
from rmsnorm.functional.residual import add_rms_norm
from rmsnorm.functional.rotary import qk_norm_rotary, rms_norm_rotary
from rmsnorm.functional.several import rms_norms

__all__ = [
    "Quantized",
    "add_rms_norm",
    "gated_rms_norm",
    "modulated_rms_norm",
    "qk_norm_rotary",
    "quantize",
    "rms_norm",
    "rms_norm_add",
    "rms_norm_add_rms_norm",
    "rms_norm_quantized",
    "rms_norm_rotary",
    "rms_norms",
]
