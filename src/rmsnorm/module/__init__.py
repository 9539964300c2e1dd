"""The norms as modules, a file each on one base."""

from rmsnorm.module.base import Norm
from rmsnorm.module.closing import RMSNormAdd
from rmsnorm.module.gated import GatedRMSNorm
from rmsnorm.module.modulated import ModulatedRMSNorm
from rmsnorm.module.plain import RMSNorm
from rmsnorm.module.rotary import QKNormRotary

__all__ = ["GatedRMSNorm", "ModulatedRMSNorm", "Norm", "QKNormRotary", "RMSNorm", "RMSNormAdd"]
