"""Adapters of PEFT around and inside a patched model: trained, saved, loaded, merged."""

import copy

import pytest
import torch

from rmsnorm import patch, unpatch
from rmsnorm.patching.replacing import is_patched
from tests.wild import models

pytestmark = [pytest.mark.wild("peft", "transformers"), pytest.mark.filterwarnings("ignore")]

# Two layers with two norms each, and the last.
NORMS = 5


def lora(**more):
    import peft

    return peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, **more)


def adapted(config):
    """A small Llama with an adapter whose values are the same at every call."""
    import peft

    model = models.build("Llama")
    torch.manual_seed(1)
    return peft.get_peft_model(model, config)


def loss(model):
    ids = models.inputs("Llama")["input_ids"]
    return model(input_ids=ids, labels=ids).loss


def gradients(model):
    model.zero_grad()
    loss(model).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(a, b):
    """To a few roundings of a model's float32: a wrong norm is off by more than thousands."""
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("first", ["patch", "adapter"])
def test_an_adapter_trains_the_same_parameters_to_the_same_gradients(first):
    import peft

    own = adapted(lora())
    if first == "patch":
        model = models.build("Llama")
        assert len(patch(model).replaced) == NORMS
        torch.manual_seed(1)
        model = peft.get_peft_model(model, lora())
    else:
        model = copy.deepcopy(own)
        assert len(patch(model).replaced) == NORMS
    assert_close(loss(model), loss(own))
    assert_close(gradients(model), gradients(own))
    assert unpatch(model) == NORMS
    assert torch.equal(loss(model), loss(own))


def test_an_adapter_is_saved_loaded_onto_a_patched_model_and_merged(tmp_path):
    import peft

    own = adapted(lora())
    trained = copy.deepcopy(own)
    patch(trained)
    trained.save_pretrained(tmp_path)
    base = models.build("Llama")
    patch(base)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    assert torch.equal(loss(loaded), loss(trained))
    with loaded.disable_adapter():
        assert_close(loss(loaded), loss(models.build("Llama")))
    merged = loaded.merge_and_unload()
    assert sum(map(is_patched, merged.modules())) == NORMS
    assert_close(loss(merged), loss(own))


def test_norms_that_are_trained_beside_the_adapter():
    own = adapted(lora(modules_to_save=["norm"]))
    model = copy.deepcopy(own)
    # The original that stays, and the copy that is trained.
    assert len(patch(model).replaced) == 2 * NORMS
    found = gradients(model)
    assert_close(found, gradients(own))
    assert any("norm.modules_to_save" in name for name in found)


def test_norms_that_are_all_that_is_trained():
    import peft

    names = ["input_layernorm", "post_attention_layernorm", "norm"]
    own = adapted(peft.LNTuningConfig(target_modules=names))
    model = copy.deepcopy(own)
    assert len(patch(model).replaced) == 2 * NORMS
    found = gradients(model)
    assert_close(found, gradients(own))
    assert len(found) == NORMS
    merged = model.merge_and_unload()
    assert sum(map(is_patched, merged.modules())) == NORMS
    assert_close(loss(merged), loss(own))
