"""Norms of other libraries than transformers."""

import importlib

import pytest
import torch

from rmsnorm import identify, patch

CASES = [
    ("torch", "torch.nn", "RMSNorm", {}, "once"),
    ("torch", "torch.nn", "RMSNorm", {"elementwise_affine": False}, "once"),
    ("litgpt", "litgpt.model", "RMSNorm", {}, "once"),
    ("litgpt", "litgpt.model", "RMSNorm", {"add_unit_offset": True}, "once"),
    ("x_transformers", "x_transformers.x_transformers", "RMSNorm", {}, "before_scale"),
    ("x_transformers", "x_transformers.x_transformers", "RMSNorm", {"unit_offset": True}, "before_scale"),
    ("x_transformers", "x_transformers.x_transformers", "SimpleRMSNorm", {}, "once"),
    ("diffusers", "diffusers.models.normalization", "RMSNorm", {"eps": 1e-6}, "weight_dtype"),
    ("diffusers", "diffusers.models.normalization", "RMSNorm", {"eps": 1e-6, "elementwise_affine": False}, "once"),
    ("diffusers", "diffusers.models.normalization", "MochiRMSNorm", {"eps": 1e-6}, "once"),
    ("timm", "timm.layers.norm", "RmsNorm", {}, "once"),
]
OTHERS = [
    ("diffusers", "diffusers.models.normalization", "RMSNorm", {"eps": 1e-6, "bias": True}),
    ("diffusers", "diffusers.models.autoencoders.autoencoder_kl_wan", "WanRMS_norm", {}),
    ("x_transformers", "x_transformers.x_transformers", "ScaleNorm", {}),
]


def build(package, module, name, arguments):
    pytest.importorskip(package, exc_type=ImportError)
    return getattr(importlib.import_module(module), name)(64, **arguments)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("package", "module", "name", "arguments", "rounding"), CASES)
def test_norms_of_other_libraries_are_replaced(package, module, name, arguments, rounding):
    norm = build(package, module, name, arguments)
    convention = identify(norm)
    assert convention is not None
    assert convention.rounding == rounding
    x = torch.randn(4, 3, 64)
    own = norm(x)
    assert len(patch(norm).replaced) == 1
    torch.testing.assert_close(norm(x), own)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("package", "module", "name", "arguments"), OTHERS)
def test_what_they_have_besides_is_left_alone(package, module, name, arguments):
    assert identify(build(package, module, name, arguments)) is None


@pytest.mark.filterwarnings("ignore")
def test_a_norm_inside_a_peft_wrapper():
    peft = pytest.importorskip("peft")
    base = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.RMSNorm(64))
    wrapped = peft.get_peft_model(base, peft.LoraConfig(target_modules=["0"], modules_to_save=["1"]))
    x = torch.randn(4, 64)
    own = wrapped(x)
    report = patch(wrapped)
    # The original and the copy that is trained.
    assert len(report.replaced) == 2
    torch.testing.assert_close(wrapped(x), own)
    wrapped(x).sum().backward()
    trained = [name for name, p in wrapped.named_parameters() if p.requires_grad and p.grad is not None]
    assert any("modules_to_save" in name for name in trained)
