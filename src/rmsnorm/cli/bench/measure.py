"""From cases to results: contestants are made, checked and raced, and each gets a line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rmsnorm.benchmarking.peers import Unavailable
from rmsnorm.benchmarking.timing import REST, Timing, make_evict, race
from rmsnorm.cli.bench import contestants
from rmsnorm.cli.bench.contestants import Maker, make_call
from rmsnorm.cli.bench.judging import find_error
from rmsnorm.cli.bench.shapes import Case, Shape
from rmsnorm.cli.bench.tensors import Inputs
from rmsnorm.cli.progress import Step
from rmsnorm.cli.text import printable

COPY = "copy"
OURS, OURS_OUT, OURS_IN_PLACE, NCNN = "rmsnorm", "rmsnorm out=", "rmsnorm in place", "ncnn in place"
OURS_THEN_COMPILED = "rmsnorm, compiled"
# They take part in one contest, where others have no such call.
ALONE = {OURS_OUT: "forward", OURS_IN_PLACE: "forward", NCNN: "forward", OURS_THEN_COMPILED: "quantized"}
CONTESTANTS: dict[str, Maker] = {
    OURS: contestants.ours,
    OURS_OUT: contestants.ours_out,
    OURS_IN_PLACE: contestants.ours_in_place,
    OURS_THEN_COMPILED: contestants.ours_then_compiled,
    "F.rms_norm": contestants.eager,
    "torch.compile": contestants.compiled,
    "F.layer_norm": contestants.layer_norm,
    "naive": contestants.naive,
    "vllm": contestants.vllm,
    "zentorch": contestants.zentorch,
    "pace": contestants.pace,
    NCNN: contestants.ncnn,
    "onnxruntime": contestants.onnxruntime,
    "liger": contestants.liger,
    "quack": contestants.quack,
    "flash-attn": contestants.flash_attn,
    "apex": contestants.apex,
}
CACHES = ("warm", "cold")


@dataclass(frozen=True)
class Result:
    """A contestant in a case: its time, or what is wrong with it, or why it could not be timed.

    `status` is timed, wrong or missing. `gb_per_s` counts the least bytes that the case must move, and `of_copy` is
    that rate as a share of the copy's, which was timed in the same rounds.
    """

    case: Case
    cache: str
    contestant: str
    status: str
    reason: str | None = None
    timing: Timing | None = None
    gb_per_s: float | None = None
    of_copy: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as a line of the file: times in microseconds."""
        case, timing = self.case, self.timing
        line: dict[str, Any] = {
            "what": case.what,
            "shape": case.shape.size,
            "name": case.shape.name,
            "dtype": case.dtype,
            "device": case.device,
            "threads": case.threads,
            "cache": self.cache,
            "contestant": self.contestant,
            "status": self.status,
        }
        if timing is None:
            return line | {"reason": self.reason}
        us = {name: float(f"{getattr(timing, name) * 1e6:.6g}") for name in ("median", "low", "high")}
        rates = {"gb_per_s": self.gb_per_s, "of_copy": self.of_copy}
        return line | {"us": us} | {name: float(f"{rate:.3g}") for name, rate in rates.items() if rate is not None}

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> Result:
        """Return what `to_json` wrote; a file may hold anything, and what is no such line raises."""
        rows, _, cols = line["shape"].partition("x")
        what, name, dtype, device, cache, contestant, status = (
            printable(line[key]) for key in ("what", "name", "dtype", "device", "cache", "contestant", "status")
        )
        case = Case(what, Shape(int(rows), int(cols), name), dtype, device, int(line["threads"]))
        if status in ("wrong", "missing"):
            return cls(case, cache, contestant, status, printable(line["reason"]))
        if status != "timed":
            raise ValueError(f"a status is timed, wrong or missing, not {status!r}")
        timing = Timing(*(_number(line["us"][key]) / 1e6 for key in ("median", "low", "high")))
        rates = (_number(line[key]) for key in ("gb_per_s", "of_copy"))
        return cls(case, cache, contestant, status, None, timing, *rates)


@dataclass(frozen=True)
class Plan:
    """How every case is measured: who runs, in which caches, and the arguments of `race`."""

    names: Sequence[str]
    caches: Sequence[str]
    rounds: int
    budget: float
    patience: float

    def size(self, cases: Iterable[Case]) -> float:
        """Return roughly the seconds that some cases take."""
        return sum(_CHECKING + len(self.caches) * self.rounds * self.round_size(case) for case in cases)

    def round_size(self, case: Case) -> float:
        """Return roughly the seconds of one round."""
        # The slowest contestant, PyTorch's own, needs some 10 ns an element, and more if it is differentiated.
        slow = case.numel * 1e-8 * (1 if case.what in ("forward", "add") else 3)
        return min(len(self.names) * self.budget + slow, self.patience / self.rounds)


_CHECKING = 2.0


def _number(value: float) -> float:
    """Return a number of a file, which is positive and finite."""
    if not 0 < value < float("inf"):
        raise ValueError(f"figures are positive and finite, not {value}")
    return float(value)


def measure(cases: Sequence[Case], plan: Plan, step: Step) -> Iterator[Result]:
    """Yield the results of each case as soon as it is done; `step` gets the sizes that `Plan.size` adds up."""
    before = torch.get_num_threads()
    try:
        for case in cases:
            torch.set_num_threads(case.threads)
            yield from _contest(case, plan, step)
    finally:
        torch.set_num_threads(before)


def _contest(case: Case, plan: Plan, step: Step) -> Iterator[Result]:
    step(str(case), _CHECKING)
    inputs = Inputs.of(case)
    calls: dict[str, Callable[[], object]] = {}
    with torch.inference_mode(case.what in ("forward", "add", "quantized")):
        target, x = torch.empty_like(inputs.x), inputs.x
        calls[COPY] = lambda: target.copy_(x)
        for name in plan.names:
            if ALONE.get(name, case.what) != case.what:
                continue
            found = _enter(case, name, inputs)
            if isinstance(found, Refused):
                yield from (Result(case, cache, name, found.status, found.reason) for cache in plan.caches)
            else:
                calls[name] = found
        for cache in plan.caches:
            yield from _timed(case, cache, calls, inputs, plan, step)


@dataclass(frozen=True)
class Refused:
    """A contestant that does not run: wrong or missing, and why."""

    status: str
    reason: str


def _enter(case: Case, name: str, inputs: Inputs) -> Callable[[], object] | Refused:
    """Make a contestant and check its results."""
    try:
        norm = CONTESTANTS[name](case, inputs)
        call = make_call(case, inputs, norm)
        error = find_error(case, norm.formula, inputs, call())
    except Unavailable as reason:
        return Refused("missing", str(reason))
    except Exception as reason:  # other people's code may raise anything
        lines = str(reason).strip().splitlines() or [""]
        return Refused("missing", printable(f"{type(reason).__name__}: {lines[0]}", 200))
    return call if error is None else Refused("wrong", error)


def _timed(
    case: Case, cache: str, calls: dict[str, Callable[[], object]], inputs: Inputs, plan: Plan, step: Step
) -> Iterator[Result]:
    device = inputs.x.device
    times = race(
        calls,
        device,
        plan.rounds,
        plan.budget,
        evict=make_evict(device) if cache == "cold" else None,
        rest=REST if case.threads > 1 and device.type == "cpu" else 0.0,
        patience=plan.patience,
        each_round=lambda: step("", plan.round_size(case)),
    )
    itemsize = inputs.x.element_size()
    roof = 2 * case.numel * itemsize / times[COPY].median
    for name, timing in times.items():
        moved = 2 * case.numel * itemsize if name == COPY else case.bytes_moved(itemsize)
        rate = moved / timing.median
        yield Result(case, cache, name, "timed", None, timing, rate / 1e9, rate / roof)
