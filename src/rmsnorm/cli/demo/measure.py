"""What the model says and how long it takes, with its own norms (before) and with ours (after)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rmsnorm.benchmarking.timing import Timing
from rmsnorm.cli.demo.model import LanguageModel, exact
from rmsnorm.cli.demo.stopwatch import PHASES, Arrivals, Stopwatch

BOTH = ("before", "after")


class Swappable(Protocol):
    """A model of transformers on either of two sets of norms, by name."""

    model: Any
    norms: dict[str, dict[str, Any]]

    def use_norms(self, which: str) -> None:
        """Use one of them, "before" or "after"."""


@dataclass(frozen=True)
class Text:
    """What greedy decoding made of a prompt, before and after.

    Where the two part, `gap` is how far apart the unchanged model's logits were for the two tokens chosen there, after
    `common` tokens.
    """

    prompt: str
    before: str
    after: str
    common: int
    gap: float | None

    @property
    def identical(self) -> bool:
        return self.gap is None


@dataclass(frozen=True)
class NormOutputs:
    """How many of all the norms' outputs change, and how many are not the exact formula's, rounded."""

    total: int
    changed: int
    inexact_before: int
    inexact_after: int


@dataclass(frozen=True)
class LogitDifference:
    """How far the logits moved, over every position of a prompt.

    `one_bit` is the yardstick: how far they move in the unchanged model when one output of its first norm is changed
    in its last bit.
    """

    largest: float
    relative: float
    same_choice: int
    positions: int
    one_bit: float


@dataclass(frozen=True)
class Times:
    """Seconds in one phase, the prefill of the whole prompt or the decoding of all new tokens."""

    whole: Timing
    norms: Timing
    norm_calls: int


@dataclass(frozen=True)
class Result:
    """Everything that was found in one dtype; `times` is by phase, then before and after."""

    dtype: str
    texts: list[Text]
    norm_outputs: NormOutputs
    logits: LogitDifference
    times: dict[str, dict[str, Times]]
    stopwatch_overhead: float


def generate_texts(
    language: LanguageModel, prompts: Iterable[str], tokens: int, step: Callable[[str], None]
) -> list[Text]:
    """Let the model answer each prompt twice."""
    return [_generate_text(language, prompt, tokens, step) for prompt in prompts]


def _generate_text(language: LanguageModel, prompt: str, tokens: int, step: Callable[[str], None]) -> Text:
    chat = language.chat(prompt)
    ids, logits = {}, {}
    for which in BOTH:
        step(f"text, {which}")
        language.use_norms(which)
        output = language.model.generate(
            **chat, max_new_tokens=tokens, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        ids[which] = output.sequences[0, chat["input_ids"].shape[1] :].tolist()
        logits[which] = output.logits
    before, after = (language.tokenizer.decode(ids[which], skip_special_tokens=True) for which in BOTH)
    # A text that ends has a token for its end, so that no text is merely the beginning of another.
    pairs = list(zip(ids["before"], ids["after"], strict=False))
    common = next((n for n, (one, other) in enumerate(pairs) if one != other), len(pairs))
    if common == len(pairs):
        return Text(prompt, before, after, common, None)
    one, other = pairs[common]
    choices = logits["before"][common][0].float()
    return Text(prompt, before, after, common, (choices[one] - choices[other]).item())


@torch.inference_mode()
def check_norms(language: LanguageModel, prompt: Tensor) -> NormOutputs:
    """Give our norms the very inputs that the model's own norms see, and count what differs."""
    total = changed = inexact_before = inexact_after = 0

    def check(norm: nn.Module, inputs: tuple[Tensor, ...], before: Tensor) -> None:
        nonlocal total, changed, inexact_before, inexact_after
        after, truth = ours[norm](*inputs), exact(norm, *inputs)
        total += before.numel()
        changed += int((after != before).sum())
        inexact_before += int((before != truth).sum())
        inexact_after += int((after != truth).sum())

    ours = {norm: language.norms["after"][name] for name, norm in language.norms["before"].items()}
    language.use_norms("before")
    hooks = [norm.register_forward_hook(check) for norm in ours]
    language.model(prompt, logits_to_keep=1)
    for hook in hooks:
        hook.remove()
    return NormOutputs(total, changed, inexact_before, inexact_after)


@torch.inference_mode()
def compare_logits(language: LanguageModel, prompt: Tensor) -> LogitDifference:
    """Run the model before, after, and before again with one bit changed."""
    logits = {}
    for which in BOTH:
        language.use_norms(which)
        logits[which] = language.model(prompt).logits[0].float()
    before, after = logits["before"], logits["after"]

    language.use_norms("before")
    first = next(iter(language.norms["before"].values()))
    hook = first.register_forward_hook(lambda norm, inputs, y: _change_one_bit(y))
    changed = language.model(prompt).logits[0].float()
    hook.remove()

    largest = (after - before).abs().max().item()
    return LogitDifference(
        largest=largest,
        relative=largest / before.abs().max().item(),
        same_choice=int((before.argmax(-1) == after.argmax(-1)).sum()),
        positions=before.shape[0],
        one_bit=(changed - before).abs().max().item(),
    )


def _change_one_bit(y: Tensor) -> Tensor:
    """Return y with its largest element moved to the next number."""
    y = y.clone()
    bits = y.view(torch.int32 if y.dtype == torch.float32 else torch.int16).flatten()
    bits[y.abs().argmax()] ^= 1
    return y


def measure_times(
    language: Swappable, prompt: Tensor, tokens: int, rounds: int, step: Callable[[str], None]
) -> tuple[dict[str, dict[str, Times]], float]:
    """Time both sets of norms in turns, and return the times by phase and set, and one stopwatch reading's own cost."""
    overhead = Stopwatch.overhead()
    whole: dict[tuple[str, str], list[float]] = {(phase, which): [] for phase in PHASES for which in BOTH}
    norms: dict[tuple[str, str], list[float]] = {(phase, which): [] for phase in PHASES for which in BOTH}
    calls: dict[str, int] = {}
    for turn in range(rounds):
        # Whoever goes first is not the same in every round.
        for which in BOTH if turn % 2 == 0 else reversed(BOTH):
            step(f"time, {which}, round {turn + 1} of {rounds}")
            language.use_norms(which)
            with Stopwatch(language.norms[which].values()) as stopwatch:
                passed = _generate(language, prompt, tokens)
            calls = stopwatch.calls
            for phase in PHASES:
                whole[phase, which].append(passed[phase])
                norms[phase, which].append(stopwatch.seconds[phase] - calls[phase] * overhead)
    times = {
        phase: {
            which: Times(Timing.of(whole[phase, which]), Timing.of(norms[phase, which]), calls[phase]) for which in BOTH
        }
        for phase in PHASES
    }
    return times, overhead


def _generate(language: Swappable, prompt: Tensor, tokens: int) -> dict[str, float]:
    """Generate one token more than `tokens`: the first ends the prefill, and the others are decoded one by one."""
    arrivals = Arrivals()
    language.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        min_new_tokens=tokens + 1,
        max_new_tokens=tokens + 1,
        do_sample=False,
        streamer=arrivals,
    )
    start, first, *_, last = arrivals.times
    return {"prefill": first - start, "decode": last - first}
