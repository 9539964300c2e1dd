"""RMSNorm for PyTorch: one answer per row, to the bit, at memory speed.

y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset)
"""

from importlib.metadata import version as _version

from rmsnorm.comparison import compare_normalization
from rmsnorm.functional import add_rms_norm, compile_as, rms_norm
from rmsnorm.module import RMSNorm

__version__ = _version("rmsnorm")

__all__ = ["RMSNorm", "__version__", "add_rms_norm", "compare_normalization", "compile_as", "rms_norm"]
