"""A whole model on its own norms and on ours: tokens per second, and the share of the time that norms take."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

import rmsnorm
from rmsnorm.benchmarking.timing import Timing
from rmsnorm.cli.demo.measure import BOTH, measure_times
from rmsnorm.cli.demo.stopwatch import PHASES
from rmsnorm.cli.progress import Step
from rmsnorm.cli.requirements import CannotRun, require
from rmsnorm.cli.text import printable

TINY = "tiny"
# Of the kind of SmolLM2 and small enough for a test: 27 million weights, 17 norms.
_TINY: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Speed:
    """A phase with one set of norms, `before` or `after` patch.

    `whole` and `norms` are seconds, `tokens_per_s` and `share_of_norms` come from their medians.
    """

    model: str
    dtype: str
    threads: int
    phase: str
    tokens: int
    norms_are: str
    whole: Timing
    norms: Timing

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.whole.median

    @property
    def share_of_norms(self) -> float:
        return self.norms.median / self.whole.median

    def to_json(self) -> dict[str, Any]:
        """Return it as a line of the file."""
        rates = {"tokens_per_s": self.tokens_per_s, "share_of_norms": self.share_of_norms}
        return asdict(self) | {name: float(f"{rate:.4g}") for name, rate in rates.items()}


class PatchedModel:
    """A causal language model with random weights, whose norms are its own or ours.

    `patch` proves and makes the classes once; after that, going back and forth is assigning them.
    """

    def __init__(self, config: str) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        read = _read(config)
        torch.manual_seed(0)
        try:
            self.model: Any = AutoModelForCausalLM.from_config(read).eval()
        except Exception as error:  # a model's constructor may raise anything
            raise CannotRun(f"transformers builds no language model from {config}: {_first_line(error)}") from None
        size = sum(parameter.numel() for parameter in self.model.parameters())
        self.name = f"{type(self.model).__name__}, {size / 1e6:,.0f} million random weights"
        self.vocabulary = int(self.model.get_input_embeddings().weight.shape[0])

    def check_length(self, tokens: int) -> None:
        """Raise `CannotRun` if the model takes fewer tokens at a time."""
        limit = getattr(self.model.config, "max_position_embeddings", None)
        if limit and tokens > limit:
            raise CannotRun(f"the model takes {limit} tokens, and {tokens} were asked for")

    def use_dtype(self, dtype: torch.dtype) -> None:
        """Change the model's dtype and prove its norms again, for that dtype."""
        rmsnorm.unpatch(self.model)
        self.model.to(dtype)
        modules = dict(self.model.named_modules())
        own = {name: type(module) for name, module in modules.items()}
        replaced = {entry.name: modules[entry.name] for entry in rmsnorm.patch(self.model).replaced}
        if not replaced:
            raise CannotRun(f"{self.name}: rmsnorm.patch replaces none of its norms; rmsnorm inspect says why")
        self.norms = {"before": replaced, "after": replaced}
        self._classes = {
            "before": {name: own[name] for name in replaced},
            "after": {name: type(module) for name, module in replaced.items()},
        }

    def use_norms(self, which: str) -> None:
        """Let the norms be their own, "before", or ours, "after"."""
        for name, cls in self._classes[which].items():
            self.norms[which][name].__class__ = cls


def measure(
    config: str, dtypes: Sequence[str], threads: Sequence[int], prefill: int, decode: int, rounds: int, step: Step
) -> Iterator[Speed]:
    """Yield the speeds in each dtype, for each number of threads, as soon as they are known."""
    step("building the model")
    language = PatchedModel(config)
    language.check_length(prefill + decode + 1)
    prompt = torch.randint(language.vocabulary, (1, prefill), generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    try:
        for count in threads:
            torch.set_num_threads(count)
            for dtype in dtypes:
                step(f"{dtype}: proving the norms")
                language.use_dtype(getattr(torch, dtype))
                times, _ = measure_times(language, prompt, decode, rounds, step)
                for phase, tokens in zip(PHASES, (prefill, decode), strict=True):
                    for which in BOTH:
                        found = times[phase][which]
                        yield Speed(language.name, dtype, count, phase, tokens, which, found.whole, found.norms)
    finally:
        torch.set_num_threads(before)


def show(speeds: Sequence[Speed]) -> None:
    """Print a table for each dtype and number of threads."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 80, highlight=False, markup=False, emoji=False)
    for (model, dtype, threads), group in groupby(speeds, lambda s: (s.model, s.dtype, s.threads)):
        title = f"{model}\n{dtype}, {threads} thread{'s' if threads > 1 else ''}"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("")
        for head in ("tokens/s", "quartiles", "norms, ms", "norms, share"):
            table.add_column(head, justify="right", no_wrap=True)
        for speed in group:
            table.add_row(
                f"{speed.phase} of {speed.tokens}, {speed.norms_are} patch",
                f"{speed.tokens_per_s:,.0f}",
                f"{speed.tokens / speed.whole.high:,.0f} to {speed.tokens / speed.whole.low:,.0f}",
                f"{speed.norms.median * 1e3:.2f}",
                f"{speed.share_of_norms:.1%}",
                style="bold" if speed.norms_are == "after" else "",
            )
        console.print(table)


def _read(config: str) -> Any:
    require("demo", "transformers")
    from transformers import AutoConfig, LlamaConfig

    if config == TINY:
        return LlamaConfig(**_TINY)
    if not Path(config).exists():
        raise CannotRun(f"{config} does not exist; --model takes a config.json, a folder with one, or nothing")
    try:
        return AutoConfig.from_pretrained(config, local_files_only=True)
    except Exception as error:  # whatever its parts do with a file that is none
        raise CannotRun(f"transformers reads no configuration from {config}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return printable(str(error).strip().partition("\n")[0])
