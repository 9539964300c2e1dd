"""Norms of other libraries than transformers: every class with RMS in its name is replaced, or refused and why."""

import os

import pytest
import torch

from rmsnorm import identify, patch, unpatch
from rmsnorm.patching.identifying import examine
from rmsnorm.patching.specimen import NotRMSNorm
from tests.wild import exact, libraries

pytestmark = pytest.mark.filterwarnings("ignore")

IMAGES = "not its input's last dimension"
PIXELS, VOXELS = (f"before_scale, channels of {dims} dimensions" for dims in (4, 5))
PARTS = "submodules with parameters"
EXPECTED = {
    "litgpt": {"model.RMSNorm": "weight, once"},
    "torchtune": {"rms_norm.RMSNorm": "scale, once", "rms_norm.GemmaRMSNorm": "scale + 1, once"},
    "x_transformers": {
        "x_transformers.RMSNorm": "g, before_scale",
        "x_transformers.SimpleRMSNorm": "no weight, once",
    },
    "timm": {
        "norm.RmsNorm": "weight, once",
        "norm.RmsNormFp32": "weight, once",
        "norm.RmsNorm2d": f"weight, {PIXELS}",
        "norm.RmsNorm2dFp32": "weight, once, channels of 4 dimensions",
    },
    "diffusers": {
        "normalization.RMSNorm": "weight, weight_dtype",
        "normalization.MochiRMSNorm": "weight, once",
        "transformer_cosmos3.Cosmos3NemotronRMSNorm": "weight, once",
        "transformer_krea2.Krea2RMSNorm": "weight + 1, once",
        "transformer_mochi.MochiModulatedRMSNorm": "no weight, once",
        "transformer_qwenimage21.QwenImage21ZeroCenterRMSNorm": "weight + 1, once",
        "transformer_stable_audio3.StableAudio3RMSNorm": "gamma, once",
        "text_encoder.RMSNorm": "weight, once",
        "autoencoder_kl_hunyuanimage_refiner.HunyuanImageRefinerRMS_norm": f"gamma, {PIXELS}",
        "autoencoder_kl_hunyuanvideo15.HunyuanVideo15RMS_norm": f"gamma, {PIXELS}",
        "autoencoder_kl_qwenimage.QwenImageRMS_norm": f"gamma, {PIXELS}",
        "autoencoder_kl_qwenimage21.QwenImage21RMS_norm": f"gamma, {PIXELS}",
        "autoencoder_kl_wan.WanRMS_norm": f"gamma, {PIXELS}",
        "autoencoder_kandinsky6_sr.Kandinsky6VAERMSNorm": f"gamma, {VOXELS}",
        "latent_upscaler_kandinsky6_sr.Kandinsky6SRLatentUpscalerRMSNorm": f"gamma, {VOXELS}",
    },
}
REFUSED = {
    "litgpt": {},
    "torchtune": {},
    "x_transformers": {
        "x_transformers.AdaptiveRMSNorm": PARTS,
        "x_transformers.MultiheadRMSNorm": "its gamma of 4x1x64 differs between rows",
    },
    "timm": {
        "norm_act.RmsNormAct": "activation",
        "norm_act.RmsNormActFp32": "activation",
        "norm_act.RmsNormAct2d": IMAGES,
        "norm_act.RmsNormAct2dFp32": IMAGES,
    },
    "diffusers": {
        "autoencoder_kl_ltx2.PerChannelRMSNorm": "other dimensions than the last",
        "normalization.LuminaRMSNormZero": PARTS,
        "transformer_mochi.MochiRMSNormZero": PARTS,
    },
}
# The same class, built otherwise.
VARIANTS = [
    ("litgpt", "model.RMSNorm", {"add_unit_offset": True}, "weight + 1, once"),
    ("x_transformers", "x_transformers.RMSNorm", {"unit_offset": True}, "g + 1, before_scale"),
    ("diffusers", "normalization.RMSNorm", {"elementwise_affine": False}, "no weight, once"),
    ("diffusers", "normalization.RMSNorm", {"bias": True}, None),
    ("diffusers", "normalization.MochiRMSNorm", {"elementwise_affine": False}, "no weight, once"),
    ("diffusers", "transformer_stable_audio3.StableAudio3RMSNorm", {"force_fp32": False}, "gamma, once"),
    ("timm", "norm.RmsNorm", {"affine": False}, "no weight, once"),
]


def norms(package):
    if not (libraries.FOLDER / package).is_dir() and not os.environ.get("CI"):
        pytest.skip(f"{package} is not in {libraries.FOLDER}: make .venv/.wild")
    return libraries.norms(package)


def generator():
    return torch.Generator().manual_seed(0)


def assert_replaced(norm, said):
    """As it says; and in three dtypes as near to float64 as before, or within what a result in the dtype must round."""
    convention = identify(norm)
    assert convention is not None
    assert str(convention).endswith(said)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        norm = norm.to(dtype)
        x = torch.randn(4, 3, libraries.WIDTH, generator=generator()).to(dtype)
        rows = x
        if convention.dims is not None:  # the rows as the pixels of images, of one pixel's width and depth
            x = x.view(4, 3, *[1] * (convention.dims - 3), -1).movedim(-1, 1).contiguous()
        own = norm(x)
        assert "" in [entry.name for entry in patch(norm).replaced]
        got = norm(x)
        weight = None if convention.weight is None else getattr(norm, convention.weight).detach().double()
        wanted = exact.forward(convention, rows.double(), weight)
        assert got.dtype == own.dtype == dtype
        errors = [
            exact.error(t if convention.dims is None else t.movedim(1, -1).reshape(rows.shape), wanted)
            for t in (got, own)
        ]
        assert errors[0] <= max(errors[1], 3 * torch.finfo(dtype).eps / 2)
        unpatch(norm)
        assert torch.equal(norm(x), own)


@pytest.mark.parametrize("package", EXPECTED)
def test_every_rms_norm_of_a_library_is_replaced_or_refused_for_what_it_is(package):
    found = norms(package)
    assert found.keys() == EXPECTED[package].keys() | REFUSED[package].keys()
    for name, said in EXPECTED[package].items():
        assert_replaced(libraries.build(found[name], generator()), said)
    for name, reason in REFUSED[package].items():
        with pytest.raises(NotRMSNorm, match=reason):
            examine(libraries.build(found[name], generator()))


@pytest.mark.parametrize(("package", "name", "arguments", "said"), VARIANTS)
def test_what_an_argument_makes_of_a_class_is_seen(package, name, arguments, said):
    norm = libraries.build(norms(package)[name], generator(), **arguments)
    if said is None:
        assert identify(norm) is None
    else:
        assert_replaced(norm, said)


@pytest.mark.parametrize(
    ("arguments", "said"), [({}, "weight, once"), ({"elementwise_affine": False}, "no weight, once")]
)
def test_torchs_own_is_replaced(arguments, said):
    assert_replaced(torch.nn.RMSNorm(libraries.WIDTH, **arguments), said)
