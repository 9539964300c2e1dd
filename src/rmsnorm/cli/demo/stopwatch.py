"""The clocks of the demo: when tokens arrive, and how long some modules take."""

import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

PHASES = ("prefill", "decode")


class Arrivals:
    """Notes when tokens arrive; it is what transformers calls a streamer."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: Tensor) -> None:
        # The prompt comes first, just before the prefill.
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class Stopwatch:
    """Adds up the seconds spent in some modules while it is entered, by hooks before and after each call."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules = list(modules)
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.calls = dict.fromkeys(PHASES, 0)
        self._started = 0.0

    def __enter__(self) -> "Stopwatch":
        self._hooks: list[Any] = []
        for module in self.modules:
            self._hooks.append(module.register_forward_pre_hook(self._start))
            self._hooks.append(module.register_forward_hook(self._stop))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def _start(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._started = time.perf_counter()

    def _stop(self, module: nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
        seconds = time.perf_counter() - self._started
        # Decoding hands over one token at a time.
        phase = "decode" if inputs[0].shape[-2] == 1 else "prefill"
        self.seconds[phase] += seconds
        self.calls[phase] += 1

    @classmethod
    def overhead(cls, calls: int = 2000) -> float:
        """Return the seconds it reads per call of a module that does nothing."""
        nothing, x = nn.Identity(), torch.empty(1, 1, 1)
        with cls([nothing]) as stopwatch:
            for _ in range(calls):
                nothing(x)
        return stopwatch.seconds["decode"] / calls
