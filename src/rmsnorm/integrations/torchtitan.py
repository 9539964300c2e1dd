"""torchtitan: `--override.imports rmsnorm.integrations.torchtitan.rms_norm` makes every RMSNorm of a model ours.

torchtitan imports this module to find what it names; without torchtitan there is nothing in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from rmsnorm import functional

if find_spec("torchtitan"):
    from torchtitan.config import derive, override
    from torchtitan.models.common.nn_modules import RMSNorm as TitanRMSNorm

    class RMSNorm(TitanRMSNorm):
        """torchtitan's own, sharding and initialisation included, but for the arithmetic."""

        @dataclass(kw_only=True, slots=True)
        class Config(TitanRMSNorm.Config):
            """The same fields."""

        def forward(self, x: Tensor) -> Tensor:
            """As `torch.nn.RMSNorm`."""
            return functional.rms_norm(x, self.weight, self.eps, normalized_shape=self.normalized_shape)

    @override(target=TitanRMSNorm.Config, description="rmsnorm: one answer per row, to the bit", exact=True)
    def rms_norm(config: Any) -> Any:
        """The configuration of this library's norm, from torchtitan's."""
        return derive(config, RMSNorm.Config)
