"""`kernels` of transformers: tiny models made by configuration, their norms through this library."""

import copy

import torch
import transformers
from kernels import Mode, kernelize, use_kernel_mapping
from kernels.layer.globals import _KERNEL_MAPPING
from transformers import AutoModelForCausalLM

import rmsnorm
from rmsnorm.integrations import layers
from rmsnorm.integrations.transformers import kernel_mapping, register
from tests.support.counting import counted

IDS = torch.arange(24).view(2, 12)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "eos_token_id": None,
    "pad_token_id": None,
    "bos_token_id": None,
}
# Norms of each: Llama has two a layer, the others also one of q and one of k; and one comes last.
NORMS = {"Llama": 5, "Olmo2": 9, "Qwen3": 9}


def model(name, dtype=torch.float32):
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**SIZES), dtype=dtype).eval()
    with torch.no_grad():
        for key, p in made.named_parameters():
            if "norm" in key:
                p.normal_(1.0, 0.1)
    return made


def gradients(given):
    given.zero_grad()
    given(IDS, labels=IDS).loss.backward()
    return {key: p.grad for key, p in given.named_parameters()}


def registered_norms_have_the_bits_of_a_patched_model_and_every_one_is_called():
    register()
    for name, norms in NORMS.items():
        for dtype in (torch.float32, torch.bfloat16):
            own = model(name, dtype)
            patched, used = copy.deepcopy(own), copy.deepcopy(own)
            rmsnorm.patch(patched)
            used.set_use_kernels(True)
            assert "forward" in vars(used.model.norm)
            with torch.no_grad():
                used(IDS)  # the examination calls operators too
                with counted() as calls:
                    y = used(IDS).logits
                wanted = patched(IDS).logits
            assert calls.total() == norms, (name, calls)
            assert torch.equal(y, wanted)
            if dtype is torch.float32:
                # The same function of other roundings: 1e-5 is some hundred of them, a wrong norm is off by a tenth.
                torch.testing.assert_close(y, own(IDS).logits, rtol=1e-5, atol=1e-5)


def gradients_are_those_of_a_patched_model():
    register()
    for name, norms in NORMS.items():
        own = model(name).train()
        patched, used = copy.deepcopy(own), copy.deepcopy(own)
        rmsnorm.patch(patched)
        used.set_use_kernels(True)  # in training mode, since the model is
        gradients(used)
        with counted() as calls:
            found = gradients(used)
        assert calls.total() == 2 * norms, (name, calls)
        wanted, theirs = gradients(patched), gradients(own)
        assert found.keys() == wanted.keys()
        for key, grad in found.items():
            assert torch.equal(grad, wanted[key]), key
            # A gradient is a sum of some hundred products, each with the roundings of a few layers.
            torch.testing.assert_close(grad, theirs[key], rtol=1e-3, atol=1e-6)


def one_name_covers_two_conventions():
    register()
    for name, rounding in (("Llama", "before_scale"), ("Olmo2", "once")):
        own = model(name, torch.bfloat16)
        convention = rmsnorm.identify(own.model.norm)
        own.set_use_kernels(True)
        x = torch.randn(4, 64).bfloat16()
        norm = own.model.norm
        assert torch.equal(norm(x), rmsnorm.rms_norm(x, norm.weight, 1e-6, rounding=rounding))
        assert convention.rounding == rounding


def mapped_for_one_block_kernelize_takes_it_in_both_modes():
    for mode in (Mode.INFERENCE, Mode.TRAINING, Mode.INFERENCE | Mode.TORCH_COMPILE):
        own = model("Llama")
        with use_kernel_mapping(kernel_mapping(["cpu"]), inherit_mapping=False):
            kernelize(own, mode=mode, device="cpu")
        with torch.no_grad():
            own(IDS)
            with counted() as calls:
                own(IDS)
        assert calls.total() == NORMS["Llama"], (mode, calls)


def compiled_without_a_break_it_has_the_same_bits():
    register()
    own = model("Qwen3")
    own.set_use_kernels(True)
    with torch.no_grad():
        eager = own(IDS, use_cache=False).logits
        compiled = torch.compile(own, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(IDS, use_cache=False).logits, eager)


def a_value_that_changes_later_is_seen():
    register()
    own = model("Llama")
    own.set_use_kernels(True)
    x, norm = torch.randn(4, 64), own.model.norm
    norm(x)
    norm.variance_epsilon = 10.0
    with counted() as calls:
        y = norm(x)
    assert calls.total() == 0  # the proof was for another eps, so the class's own forward ran
    torch.testing.assert_close(y, rmsnorm.rms_norm(x, norm.weight, 10.0), rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        norm.weight.zero_()
    assert not norm(x).any()


def copies_and_pickles_of_a_model_keep_it():
    register()
    own = model("Llama")
    own.set_use_kernels(True)
    again = copy.deepcopy(own)
    with torch.no_grad():
        again.model.norm.weight.zero_()
        assert own(IDS).logits.any()
        assert not again(IDS).logits.any()


def what_is_no_rms_norm_keeps_its_own_forward():
    class Shifted(torch.nn.Module):
        def forward(self, hidden_states):
            return hidden_states + 1

    module = Shifted()
    module.forward = layers.RMSNorm.forward.__get__(module)
    assert torch.equal(module(torch.zeros(3)), torch.ones(3))


def on_cuda_it_comes_before_transformers_own_choice():
    register()
    model("Llama").set_use_kernels(True)  # registers transformers' mapping, as each call does
    for device in ("cuda", "rocm"):
        for capability in (80, 90, 120):
            chosen = _KERNEL_MAPPING.get()["RMSNorm"][device].repos_by_capability.find_smallest_interval(capability)
            assert set(map(str, chosen.values())) == {"rmsnorm, layer RMSNorm"}, (device, capability, chosen)
