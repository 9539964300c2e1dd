"""Lightning: `Trainer(callbacks=[rmsnorm.integrations.lightning.callback()])`."""

from __future__ import annotations

from typing import Any

from torch import nn

from rmsnorm.patching import patch, unpatch


def callback() -> Any:
    """A callback that patches the module in `setup`, before it is wrapped, and takes that back in `teardown`.

    Its `report` is what `rmsnorm.patch` found.

    Raises:
        ImportError: neither `lightning` nor `pytorch_lightning` is installed.
    """
    from importlib.util import find_spec

    if find_spec("lightning"):
        from lightning.pytorch import Callback
    else:
        from pytorch_lightning import Callback

    class PatchNorms(Callback):
        """Patches the module for as long as it is run."""

        def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
            self.report = patch(pl_module)

        def teardown(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
            unpatch(pl_module)

    return PatchNorms()
