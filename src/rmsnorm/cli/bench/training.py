"""A training step of a whole model on its own norms and on ours: seconds, and the most memory that it takes."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, product
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from rmsnorm.benchmarking.timing import Timing, duration
from rmsnorm.cli.bench.model import PatchedModel
from rmsnorm.cli.demo.measure import BOTH
from rmsnorm.cli.progress import Step

# "autocast" has its weights in float32, and computes in bfloat16 where autocast does.
AUTOCAST = "autocast"
PRECISIONS = ("float32", "bfloat16", AUTOCAST)


@dataclass(frozen=True)
class Training:
    """Steps of one model with one set of norms, `before` or `after` patch.

    `whole` is seconds of forward, backward and AdamW. `peak` is the most bytes that tensors of a step take at a time,
    beyond those that are there before and after it: weights, their gradients and the optimizer's.
    """

    model: str
    precision: str
    threads: int
    tokens: int
    checkpointing: bool
    compiled: bool
    norms_are: str
    whole: Timing
    peak: int

    def to_json(self) -> dict[str, Any]:
        """Return it as a line of the file."""
        return asdict(self) | {"phase": "training", "tokens_per_s": float(f"{self.tokens / self.whole.median:.4g}")}


def count(precisions: Sequence[str], threads: Sequence[int], rounds: int, compiled: bool) -> int:
    """Return how many steps of progress `measure` tells."""
    ways = 2 * (1 + compiled)
    return 1 + len(precisions) * len(threads) * 2 * ways * (rounds + 1)


def measure(
    config: str,
    precisions: Sequence[str],
    threads: Sequence[int],
    tokens: int,
    rounds: int,
    compiled: bool,
    step: Step,
) -> Iterator[Training]:
    """Yield what was found in each precision, for each number of threads, without and with checkpointing."""
    step("building the model")
    language = PatchedModel(config)
    language.check_length(tokens)
    ids = torch.randint(language.vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    try:
        for number, precision in product(threads, precisions):
            torch.set_num_threads(number)
            language.use_dtype(torch.float32 if precision == AUTOCAST else getattr(torch, precision))
            for checkpointing in (False, True):
                steps = _Steps(language, ids, precision, checkpointing)
                ways = [(which, way) for way in ((False, True) if compiled else (False,)) for which in BOTH]
                for (which, way), (whole, peak) in steps.race(ways, rounds, step).items():
                    yield Training(language.name, precision, number, tokens, checkpointing, way, which, whole, peak)
    finally:
        torch.set_num_threads(before)


class _Steps:
    """Training steps of one model in one precision, on either set of norms, compiled or not."""

    def __init__(self, language: PatchedModel, ids: Tensor, precision: str, checkpointing: bool) -> None:
        self._language, self._ids, self._autocast = language, ids, precision == AUTOCAST
        self._name = f"{precision}{', checkpointing' if checkpointing else ''}"
        model = language.model.train()
        _switch(model, checkpointing)
        # Nothing is learned: the weights stay what they are, and every step is the same. Fused it takes no memory.
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=True)
        torch._dynamo.reset()
        self._calls: dict[bool, Callable[..., Any]] = {False: model, True: torch.compile(model, dynamic=False)}

    def race(
        self, ways: Sequence[tuple[str, bool]], rounds: int, step: Step
    ) -> dict[tuple[str, bool], tuple[Timing, int]]:
        """Let all ways take turns; returns seconds and bytes of each."""
        peaks, seconds = {}, {way: list[float]() for way in ways}
        for way in ways:
            step(f"{self._name}: memory, {_said(*way)}")
            self._one(*way)  # compiles, and makes what the optimizer keeps
            peaks[way] = peak_memory(lambda way=way: self._one(*way))  # type: ignore[misc]
        for turn in range(rounds):
            for way in ways if turn % 2 == 0 else reversed(ways):
                step(f"{self._name}: {_said(*way)}, round {turn + 1} of {rounds}")
                start = time.perf_counter()
                self._one(*way)
                seconds[way].append(time.perf_counter() - start)
        return {way: (Timing.of(seconds[way]), peaks[way]) for way in ways}

    def _one(self, which: str, compiled: bool) -> None:
        self._language.use_norms(which)
        self._optimizer.zero_grad(set_to_none=False)
        with torch.autocast("cpu", torch.bfloat16) if self._autocast else contextlib.nullcontext():
            loss = self._calls[compiled](input_ids=self._ids, labels=self._ids, use_cache=False).loss
        loss.backward()
        self._optimizer.step()


def _switch(model: Any, checkpointing: bool) -> None:
    """Checkpointing on or off, by the name that transformers has for it."""
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    if not checkpointing:
        getattr(model, f"{kind}_checkpointing_disable")()
    else:
        getattr(model, f"{kind}_checkpointing_enable")(**{f"{kind}_checkpointing_kwargs": {"use_reentrant": False}})


def peak_memory(call: Callable[[], object]) -> int:
    """Return the most bytes that are allocated at a time during a call, beyond those that are there before it."""
    with _silent(), profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        call()
    assert found.profiler is not None  # noqa: S101 - it has run
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Nothing comes to standard error: the profiler says there that it starts and ends."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _said(which: str, compiled: bool) -> str:
    return f"{'own norms' if which == 'before' else 'ours'}{', compiled' if compiled else ''}"


def show(found: Sequence[Training]) -> None:
    """Print a table for each precision, without and with checkpointing."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 80, highlight=False, markup=False, emoji=False)
    for _, group in groupby(found, lambda t: (t.model, t.precision, t.threads, t.checkpointing)):
        rows = list(group)
        first = rows[0]
        way = "activation checkpointing" if first.checkpointing else "activations kept"
        title = (
            f"{first.model}\na training step of {first.tokens} tokens, {first.precision}, "
            f"{first.threads} thread{'s' if first.threads > 1 else ''}, {way}"
        )
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("", no_wrap=True)
        for head in ("a step", "quartiles", "ratio", "peak, MB", "ratio"):
            table.add_column(head, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(
                _said(row.norms_are, row.compiled),
                duration(row.whole.median),
                f"{duration(row.whole.low)} to {duration(row.whole.high)}",
                f"{row.whole.median / first.whole.median:.2f}",
                f"{row.peak / 2**20:,.1f}",
                f"{row.peak / first.peak:.2f}",
                style="bold" if row.norms_are == "after" else "",
            )
        console.print(table)
