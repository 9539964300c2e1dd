"""Measuring time: contestants take turns, and a median with its quartiles is what counts."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

# Where no cache's size can be read: more than the last cache of most processors.
_UNKNOWN_CACHE = 64 << 20
# GNU OpenMP's idle threads spin for some milliseconds before they sleep, on a core that the next contestant wants.
REST = 6e-3
# On an accelerator, where each takes some tens of microseconds. What is timed must have been queued before they are
# through, and a backward takes the host a hundred.
EVICTIONS = 10

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Seconds: the median of some samples, and the quartiles below and above it."""

    median: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """How many times the lower quartile the upper one is: 1 on a machine that does nothing else."""
        return self.high / self.low

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Timing":
        """The median and quartiles of at least one sample."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high)


def race(
    contestants: Mapping[str, Call],
    device: torch.device,
    rounds: int = 15,
    budget: float = 2e-3,
    *,
    evict: Call | None = None,
    rest: float = 0.0,
    patience: float = float("inf"),
    each_round: Call = lambda: None,
) -> dict[str, Timing]:
    """Time each contestant's call, in seconds.

    Every round times each of them once, for about `budget` seconds, so that a machine which slows down or is
    disturbed for a while slows all of them. With `evict`, which is to empty the caches, a turn is a single call after
    it. `rest` seconds pass before every turn: see `REST`. After `patience` seconds no round begins but the first three.
    """
    calls = {}
    for name, call in contestants.items():
        call()
        once = _seconds(call, 1, device)
        if once < budget:
            call()
            once = _seconds(call, 1, device)
        calls[name] = max(1, int(budget / max(once, 1e-7)))
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    begin = time.monotonic()
    for done in range(rounds):
        if done >= 3 and time.monotonic() - begin > patience:
            break
        each_round()
        for name, call in contestants.items():
            if rest:
                time.sleep(rest)
            if evict is not None:
                samples[name].append(_seconds_after(evict, call, device))
                continue
            if calls[name] > 1:
                call()  # finds what the one before left in the caches
            samples[name].append(_seconds(call, calls[name], device))
    return {name: Timing.of(times) for name, times in samples.items()}


def duration(seconds: float) -> str:
    """Return seconds as text, with three digits and a unit."""
    units = ("s", 1.0), ("ms", 1e-3), ("us", 1e-6)
    unit, size = next(((unit, size) for unit, size in units if seconds >= size * 0.9995), units[-1])
    value = seconds / size
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def make_evict(device: torch.device) -> Call:
    """Return a function that fills the caches of a device with what nobody needs."""
    buffer = torch.zeros(2 * cache_size(device) // 4, dtype=torch.int32, device=device)
    times = 1 if device.type == "cpu" else EVICTIONS

    def evict() -> torch.Tensor:
        for _ in range(times):
            buffer.add_(1)
        return buffer

    return evict


def cache_size(device: torch.device) -> int:
    """Return the bytes in all caches of the last level that a device's cores have."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    # One file for each core, in which cores that share a cache name each other.
    sizes: dict[str, int] = {}
    for index in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index3"):
        kilobytes = (index / "size").read_text().strip().removesuffix("K")
        sizes[(index / "shared_cpu_list").read_text()] = int(kilobytes) << 10
    return sum(sizes.values()) or _UNKNOWN_CACHE


def _seconds(call: Call, times: int, device: torch.device) -> float:
    _finish(device)
    start = time.perf_counter()
    for _ in range(times):
        call()
    _finish(device)
    return (time.perf_counter() - start) / times


def _seconds_after(evict: Call, call: Call, device: torch.device) -> float:
    if device.type == "cpu":
        evict()
        return _seconds(call, 1, device)
    # The call is queued while the device still evicts, so that these are the device's seconds and not Python's.
    start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    evict()
    start.record()
    call()
    end.record()
    _finish(device)
    return float(start.elapsed_time(end)) / 1e3


def _finish(device: torch.device) -> None:
    # A call on an accelerator returns before its work is done.
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
