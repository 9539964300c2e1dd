"""Trainers and model makers: Lightning, LitGPT, torchtitan, the Trainer of transformers."""

import tempfile

import lightning
import litgpt
import torch
import transformers
from torch import nn
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs

import rmsnorm
from rmsnorm.integrations import lightning as for_lightning
from rmsnorm.integrations import litgpt as for_litgpt
from rmsnorm.integrations.transformers import trainer_callback
from rmsnorm.patching.replacing import is_patched
from tests.support.counting import counted


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.RMSNorm(16, eps=1e-6), nn.Linear(16, 1))

    def training_step(self, batch, _):
        self.patched = is_patched(self.layers[1])
        with counted() as calls:
            loss = self.layers(batch).square().mean()
        self.calls = calls.total()
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(rmsnorm.param_groups(self, weight_decay=0.0), lr=0.1)


def lightning_trains_with_our_norms_and_has_its_own_back_afterwards():
    module, callback = Module(), for_lightning.callback()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_steps=2, accelerator="cpu", callbacks=[callback], enable_model_summary=False, **quiet
    )
    before = module.layers[1].weight.detach().clone()
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(8, 16), batch_size=4))
    assert module.patched
    assert module.calls == 1
    assert [entry.name for entry in callback.report.replaced] == ["layers.1"]
    assert not is_patched(module.layers[1])
    assert not torch.equal(module.layers[1].weight, before)


def the_trainer_of_transformers_trains_with_our_norms():
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    model = transformers.LlamaForCausalLM(config)
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(4)]
    callback = trainer_callback()
    with tempfile.TemporaryDirectory() as folder:
        options = transformers.TrainingArguments(folder, max_steps=2, use_cpu=True, report_to=[], save_strategy="no")
        trainer = transformers.Trainer(model, options, train_dataset=rows, callbacks=[callback])
        assert len(callback.report.replaced) == 3
        with counted() as calls:
            trainer.train()
    assert calls["forward_train.default"] == calls["backward.default"] == 3 * 2, calls
    assert all(p.isfinite().all() for p in model.parameters())


def litgpt_makes_its_models_with_our_norms():
    config = litgpt.Config(
        n_layer=2, n_head=2, n_embd=32, intermediate_size=32, block_size=16, vocab_size=64, norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP", bias=False, parallel_residual=False,
    )  # fmt: skip
    own = litgpt.GPT(config)
    for_litgpt.register()
    try:
        ours = litgpt.GPT(config)
    finally:
        for_litgpt.unregister()
    ours.load_state_dict(own.state_dict())
    ids = torch.arange(16)[None]
    with counted() as calls:
        y = ours(ids)
    assert calls.total() == 5, calls
    # The same function of other roundings: some hundred of them, and a wrong norm is off by a tenth.
    torch.testing.assert_close(y, own(ids), rtol=1e-5, atol=1e-5)
    y.sum().backward()
    assert ours.transformer.ln_f.weight.grad.any()
    assert isinstance(config.norm_class(8).weight, nn.Parameter)
    assert not isinstance(litgpt.GPT(config).transformer.ln_f, rmsnorm.RMSNorm)
    offset = for_litgpt.LitRMSNorm(8, add_unit_offset=True)
    assert torch.equal(offset(torch.ones(8)), rmsnorm.rms_norm(torch.ones(8)))


def torchtitan_builds_its_debug_model_with_our_norms():
    built = []
    for imports in ([], ["rmsnorm.integrations.torchtitan.rms_norm"]):
        config = llama3_configs["debugmodel"](attn_backend="flex")
        for layer in config.layers:  # flex attention has no backward on CPUs
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
        if imports:
            apply_overrides(OverrideConfig(imports=imports), config)
        model = config.build()
        torch.manual_seed(0)
        model.init_states()
        built.append(model)
    own, ours = built
    ids = torch.arange(32).view(2, 16)
    positions = torch.arange(16).expand(2, 16)
    norms = [m for m in own.modules() if isinstance(m, nn.RMSNorm)]
    with counted() as calls:
        y = ours(ids, positions)
    assert calls.total() == len(norms) > 4, calls
    wanted = own(ids, positions)
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)  # as above
    y.sum().backward()
    wanted.sum().backward()
    for (name, p), q in zip(own.named_parameters(), ours.parameters(), strict=True):
        # Sums of some hundred products, through as many layers.
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-4, msg=lambda said, name=name: f"{name}: {said}")
