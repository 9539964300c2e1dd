"""Axolotl's plugin manager, with this library's plugin."""

import torch
from axolotl.integrations.base import PluginManager
from torch import nn

from rmsnorm.patching.replacing import is_patched


def the_plugin_manager_finds_the_plugin_and_a_built_model_is_patched():
    manager = PluginManager.get_instance()
    manager.register("rmsnorm.integrations.axolotl.RMSNormPlugin")
    model = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8, eps=1e-6))
    manager.post_model_build({}, model)
    assert is_patched(model[1])
    (plugin,) = manager.plugins.values()
    assert [entry.name for entry in plugin.report.replaced] == ["1"]
    model(torch.randn(2, 8)).sum().backward()
    assert model[1].weight.grad.any()
