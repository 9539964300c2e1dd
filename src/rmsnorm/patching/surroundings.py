"""What is set around a module: default dtype and device, autocast, random generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch


def random_state() -> tuple[Any, ...]:
    """Of torch's, Python's and numpy's generators: what draws from them moves what the next one draws."""
    of_numpy = repr(numpy.random.get_state()) if (numpy := sys.modules.get("numpy")) is not None else None
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    of_torch = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]
    return tuple(bytes(t.tolist()) for t in of_torch), random.getstate(), of_numpy


@contextmanager
def undisturbed() -> Iterator[None]:
    """Inside, new tensors are what a probe expects them to be, whatever the caller has set; nothing random moves."""
    dtype, python, numpy = torch.get_default_dtype(), random.getstate(), sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    torch.set_default_dtype(torch.float32)
    try:
        # Every call of torch pays for a device that is set, so it is only where it must be.
        cpu = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
        with torch.inference_mode(False), cpu, torch.random.fork_rng(devices), _without_autocast():
            yield
    finally:
        torch.set_default_dtype(dtype)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


@contextmanager
def _without_autocast() -> Iterator[None]:
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    for kind in kinds:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind in kinds:
            torch.set_autocast_enabled(kind, True)
