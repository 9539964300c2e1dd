"""Axolotl: `plugins: [rmsnorm.integrations.axolotl.RMSNormPlugin]` in its configuration."""

from __future__ import annotations

import functools
import logging
from typing import Any

from torch import nn

from rmsnorm.patching import patch


@functools.cache
def _plugin() -> type:
    from axolotl.integrations.base import BasePlugin

    class RMSNormPlugin(BasePlugin):
        """Patches the model when it is built, before adapters are added."""

        def post_model_build(self, cfg: Any, model: nn.Module) -> None:
            self.report = patch(model)
            logging.getLogger(__name__).info("%s", self.report)

    return RMSNormPlugin


def __getattr__(name: str) -> Any:
    # Axolotl takes the class out of this module, which can be imported without Axolotl.
    if name == "RMSNormPlugin":
        return _plugin()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
