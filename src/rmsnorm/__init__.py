"""RMSNorm for PyTorch: one answer per row, to the bit, at memory speed.

y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset)
"""

from importlib.metadata import version as _version

from rmsnorm.benchmarking.comparison import compare_normalization
from rmsnorm.dispatch import compile_as
from rmsnorm.functional import (
    Quantized,
    add_rms_norm,
    gated_rms_norm,
    modulated_rms_norm,
    qk_norm_rotary,
    quantize,
    rms_norm,
    rms_norm_add,
    rms_norm_add_rms_norm,
    rms_norm_quantized,
    rms_norm_rotary,
    rms_norms,
)
from rmsnorm.module import GatedRMSNorm, ModulatedRMSNorm, QKNormRotary, RMSNorm, RMSNormAdd
from rmsnorm.patching import Convention, Report, identify, patch, unpatch
from rmsnorm.patching.convert import fold_offset, unfold_offset
from rmsnorm.recipes import float32_weights, fold_into_linear, from_offset, param_groups, to_offset

__version__ = _version("rmsnorm")

__all__ = [
    "Convention",
    "GatedRMSNorm",
    "ModulatedRMSNorm",
    "QKNormRotary",
    "Quantized",
    "RMSNorm",
    "RMSNormAdd",
    "Report",
    "__version__",
    "add_rms_norm",
    "compare_normalization",
    "compile_as",
    "float32_weights",
    "fold_into_linear",
    "fold_offset",
    "from_offset",
    "gated_rms_norm",
    "identify",
    "modulated_rms_norm",
    "param_groups",
    "patch",
    "qk_norm_rotary",
    "quantize",
    "rms_norm",
    "rms_norm_add",
    "rms_norm_add_rms_norm",
    "rms_norm_quantized",
    "rms_norm_rotary",
    "rms_norms",
    "to_offset",
    "unfold_offset",
    "unpatch",
]
