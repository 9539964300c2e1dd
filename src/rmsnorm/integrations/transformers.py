"""Transformers: `register()` makes `use_kernels=True` choose this library for every RMSNorm.

Both packages are needed, transformers and the version of `kernels` that it names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from rmsnorm.integrations import layers

DEVICES = ("cpu", "cuda", "rocm")
_LAYERS = ("RMSNorm", "RMSNormGated")


@dataclass(frozen=True)
class Repository:
    """What the package `kernels` asks for a layer: this library's, under one name."""

    layer_name: str

    def load(self) -> type[nn.Module]:
        """The class whose forward modules of that name receive."""
        return getattr(layers, self.layer_name)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return f"rmsnorm, layer {self.layer_name}"


def kernel_mapping(devices: Iterable[str] = DEVICES) -> dict[str, dict[str, Any]]:
    """Layers by name and device, for `kernels.use_kernel_mapping` and `kernels.register_kernel_mapping`."""
    chosen = tuple(devices)
    if unknown := [device for device in chosen if device not in DEVICES]:
        raise ValueError(f"devices must be among {', '.join(DEVICES)}, got {', '.join(map(repr, unknown))}")
    return {name: {device: Repository(name) for device in chosen} for name in _LAYERS}


def register(devices: Iterable[str] = DEVICES) -> None:
    """Makes this library the choice of `model.set_use_kernels(True)` and `from_pretrained(..., use_kernels=True)`.

    One name, "RMSNorm", stands for norms of several conventions; so each is examined at its first call, as by
    `rmsnorm.patch`, and computes what its class computes.

    Args:
        devices: where.

    Raises:
        ImportError: transformers or the version of `kernels` that it wants is not installed.
    """
    from kernels import register_kernel_mapping
    from transformers.integrations import hub_kernels
    from transformers.utils.import_utils import is_kernels_available

    mapping = kernel_mapping(devices)
    if not is_kernels_available():
        raise ImportError("transformers takes no notice of the installed version of kernels: see its requirements")
    register_kernel_mapping(mapping)
    # set_use_kernels registers transformers' own choice each time, after ours.
    for name, chosen in mapping.items():
        own = hub_kernels.get_kernel_mapping_transformers().setdefault(name, {})
        for device, repository in chosen.items():
            own[device] = repository


def trainer_callback() -> Any:
    """A callback for `Trainer(callbacks=[...])` that patches the model when the trainer is made, before it is wrapped.

    Its `report` is what `rmsnorm.patch` found. For models whose classes `register` does not reach.

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers import TrainerCallback

    from rmsnorm.patching import patch

    class PatchNorms(TrainerCallback):
        """Patches the model."""

        def on_init_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.report = patch(given["model"])

    return PatchNorms()
