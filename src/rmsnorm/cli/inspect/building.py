"""Builds the model that a configuration describes: without memory for weights, and nothing but models is called."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from rmsnorm.cli.requirements import CannotRun
from rmsnorm.cli.text import printable

# The largest models stay below a tenth of these: beyond, a configuration is a mistake, or made to take all memory.
MOST_MODULES, LARGEST_COUNT, WIDEST_NORM, MOST_BYTES = 100_000, 10_000, 2**17, 2**32
_COUNT = re.compile(r"layers?$|depths?$|blocks?$|^num_|^n_(?!positions|ctx|embd|inner)|^layers|_layers_|experts")
_EPS = re.compile(r"norm.*eps|eps.*norm|^eps$|^epsilon$", re.IGNORECASE)


class TooLarge(Exception):
    """The model would take more memory than there should be."""


def eps_values(config: dict[str, Any]) -> dict[str, float]:
    """Every eps of norms in a configuration by its path, those of its parts included.

    Raises:
        CannotRun: one of them is no number.
    """
    found = {}
    for path, value in _entries(config):
        name = path.rpartition(".")[2]
        if value is None or not _EPS.search(name):
            continue
        try:
            if isinstance(value, bool):
                raise TypeError
            found[path] = float(value)
        except (TypeError, ValueError, OverflowError):
            shown = printable(repr(value) if not isinstance(value, int) else f"an integer of {value.bit_length()} bits")
            raise CannotRun(f"{printable(path)} in the configuration must be a number, got {shown}") from None
    return found


def _entries(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Everything in a configuration but its parts themselves."""
    parts: list[tuple[str, dict[str, Any]]] = [("", config)]
    while parts:
        prefix, part = parts.pop()
        for name, value in part.items():
            if isinstance(value, dict):
                parts.append((f"{prefix}{name}.", value))
            else:
                yield f"{prefix}{name}", value


def build(config_file: Path, config: dict[str, Any]) -> nn.Module | str:
    """The model of a configuration on the meta device, or why transformers does not build it."""
    import transformers

    if excess := _excess(config):
        return f"the configuration has {excess}"
    try:
        with _nothing_said(), _offline(), _no_more_than(MOST_MODULES), _no_more_memory_than(MOST_BYTES):
            # Code beside the weights is never run; left open, transformers would ask on the terminal.
            parsed = transformers.AutoConfig.from_pretrained(
                str(config_file), local_files_only=True, trust_remote_code=False
            )
            cls = _named_class(parsed)
            with torch.device("meta"):
                model: nn.Module = cls(parsed) if cls is not None else transformers.AutoModel.from_config(parsed)
    except TooLarge as error:
        return str(error)
    except Exception as error:  # a model's constructor may raise anything
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        return f"transformers does not build this model: {printable(said)}"
    norms = (module for module in model.modules() if "norm" in type(module).__name__.lower())
    widest = max((p.numel() for norm in norms for p in norm.parameters(recurse=False)), default=0)
    return f"the model has a norm of {widest} elements" if widest > WIDEST_NORM else model


def _named_class(config: Any) -> Any:
    """The class that a configuration names, if it is a model of transformers': nothing else may be called."""
    import transformers

    names = getattr(config, "architectures", None)
    name = names[0] if isinstance(names, (list, tuple)) and names else None
    cls = getattr(transformers, name, None) if isinstance(name, str) and name.isidentifier() else None
    return cls if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel) else None


def _excess(config: dict[str, Any]) -> str | None:
    """A count that no model has: transformers makes lists of such lengths before there is a module."""
    for path, value in _entries(config):
        if isinstance(value, int) and value > LARGEST_COUNT and _COUNT.search(path.rpartition(".")[2]):
            shown = str(value) if value < 2**64 else "a number beyond 64 bits"
            return f"{printable(path)} = {shown}, more than any model"
    return None


@contextlib.contextmanager
def _no_more_than(count: int) -> Iterator[None]:
    """Stops the building of models of more modules."""
    made = 0

    def one_more(*_: Any) -> None:
        nonlocal made
        made += 1
        if made > count:
            raise TooLarge(f"the model has more than {count} modules")

    handle = torch_module.register_module_module_registration_hook(one_more)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _no_more_memory_than(extra: int) -> Iterator[None]:
    """Has allocations fail beyond that many bytes more than now, where the system can: on Linux."""
    statm = Path("/proc/self/statm")
    if not statm.is_file():
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = int(statm.read_text().split()[0]) * resource.getpagesize() + extra
    resource.setrlimit(resource.RLIMIT_AS, (most if soft == resource.RLIM_INFINITY else min(most, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def _nothing_said() -> Iterator[None]:
    """Keeps what transformers says of a configuration, with the configuration's words in it, from the terminal."""
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.CRITICAL + 1)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Nothing that a configuration names is fetched."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
