"""Measuring time: contestants take turns, and a median with its quartiles is what counts."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds: the median of some samples, and the quartiles below and above it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Timing":
        """The median and quartiles of at least one sample."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high)


def race(
    contestants: Mapping[str, Callable[[], object]], device: torch.device, rounds: int = 15, budget: float = 2e-3
) -> dict[str, Timing]:
    """Time each contestant's call, in seconds.

    Every round times each of them once, for about `budget` seconds, so that a machine which slows down or is
    disturbed for a while slows all of them.
    """
    calls = {}
    for name, call in contestants.items():
        for _ in range(3):
            call()
        calls[name] = max(1, int(budget / max(_seconds(call, 1, device), 1e-7)))
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, call in contestants.items():
            samples[name].append(_seconds(call, calls[name], device))
    return {name: Timing.of(times) for name, times in samples.items()}


def _seconds(call: Callable[[], object], times: int, device: torch.device) -> float:
    _finish(device)
    start = time.perf_counter()
    for _ in range(times):
        call()
    _finish(device)
    return (time.perf_counter() - start) / times


def _finish(device: torch.device) -> None:
    # A call on an accelerator returns before its work is done.
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
