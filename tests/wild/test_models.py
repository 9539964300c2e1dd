"""Whole architectures, small: logits, a training step, saving and loading, and the way back, with patched norms."""

import copy

import pytest
import torch

from rmsnorm import patch, unpatch
from rmsnorm.patching.replacing import is_patched
from tests.wild import models

pytestmark = [
    pytest.mark.wild("transformers"),
    # transformers' own habits: fast paths that are not installed, and deprecations inside.
    pytest.mark.filterwarnings("ignore"),
]

# How far the patched model may be from the model in float64, beside the model's own distance in float32. Each is a sum
# of many roundings of either sign, so the larger of two such distances is seldom twice the smaller; a wrong norm is off
# by thousands.
FACTOR = 4.0
STEP = 0.1


def logits(model, name):
    with torch.no_grad():
        return model(**models.inputs(name)).logits


def training_step(model, name):
    """The parameters after one step of gradient descent."""
    model = copy.deepcopy(model)
    given = models.inputs(name)
    loss = torch.nn.functional.cross_entropy(model(**given).logits.flatten(0, 1), given["input_ids"].flatten())
    loss.backward()
    with torch.no_grad():
        return {key: p - STEP * p.grad for key, p in model.named_parameters() if p.grad is not None}


def distance(a, b):
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())


@pytest.mark.parametrize("name", models.MODELS)
def test_a_patched_model_computes_trains_and_saves_as_before(name, tmp_path):
    model = models.build(name)
    wide = models.inputs(name)
    own, own_step = logits(model, name), training_step(model, name)
    state = {key: t.clone() for key, t in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    norms = [key for key, m in model.named_modules() if is_rms_norm_by_name(type(m).__name__)]

    report = patch(model)

    assert sorted(entry.name for entry in report.replaced) == sorted(norms)
    got, got_step = logits(model, name), training_step(model, name)
    double = unpatched_double(model)
    with torch.no_grad():
        exact = double(**{k: t.double() if t.is_floating_point() else t for k, t in wide.items()}).logits
    assert distance(got, exact) <= FACTOR * max(distance(own, exact), 2.0**-23)
    assert got_step.keys() == own_step.keys()
    for key, p in got_step.items():
        # Relative to the largest parameter of its kind, steps differ by their gradients' roundings.
        assert distance(p, own_step[key]) <= 1e-4, key

    assert all(parameters[key] is p for key, p in model.named_parameters())
    assert all(torch.equal(t, state[key]) for key, t in model.state_dict().items())
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    loaded.config._experts_implementation = "eager"
    assert not any(is_patched(m) for m in loaded.modules())
    assert torch.equal(logits(loaded, name), own)
    patch(loaded)
    assert torch.equal(logits(loaded, name), got)

    assert unpatch(model) == len(norms)
    assert torch.equal(logits(model, name), own)


def is_rms_norm_by_name(name):
    return "RMSNorm" in name or name in ("T5LayerNorm", "Llama4TextL2Norm")


def unpatched_double(model):
    double = copy.deepcopy(model)
    unpatch(double)
    return double.double()
