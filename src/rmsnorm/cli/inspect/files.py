"""Which files make up a checkpoint, and what their names and indexes say of it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rmsnorm.cli.requirements import CannotRun

_PART = re.compile(r"(.*-)(\d{1,5})-of-(\d{1,5})(\.[^.]+)")
# The index of the largest models has ten megabytes.
_LONGEST_JSON = 2**27


@dataclass(frozen=True)
class Parts:
    """The files of a checkpoint; `whole` if they should hold all of it, `index` what an index has where."""

    files: tuple[Path, ...] = ()
    whole: bool = True
    index: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """What to call it."""
        more = f" and {len(self.files) - 1} more parts" if len(self.files) > 1 else ""
        return f"{self.files[0]}{more}"


def regular(path: Path) -> bool:
    """Whether it is a file that ends: opening a FIFO or a device may wait for ever."""
    return path.is_file()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CannotRun: there is none.
    """
    if not regular(path):
        raise CannotRun(f"{path} is no regular file")
    if path.stat().st_size > _LONGEST_JSON:
        raise CannotRun(f"{path} is too long: {path.stat().st_size} bytes")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CannotRun(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise CannotRun(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def siblings(path: Path) -> list[Path]:
    """All parts of the whole that a name like `model-00002-of-00003.gguf` speaks of; the file alone if it does not."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    stem, number, count, suffix = match.groups()
    parts = [path.with_name(f"{stem}{i:0{len(number)}}-of-{count}{suffix}") for i in range(1, int(count) + 1)]
    return parts if path in parts else [path]


def parts_beside(path: Path) -> Parts:
    """One .safetensors file, which may be a part."""
    count = len(siblings(path))
    note = (f"This is one part of {count}: the folder has the rest of the model.",) if count > 1 else ()
    return Parts((path,), whole=count <= 1, notes=note)


def gguf_parts(path: Path) -> Parts:
    """A GGUF file with the other parts of the model, as far as they are there."""
    parts = siblings(path)
    there = [part for part in parts if regular(part)]
    missing = [part for part in parts if part not in there]
    if not missing:
        return Parts(tuple(there))
    text = f"the model is not complete: {_listed([part.name for part in missing])}, {len(there)} parts of "
    return Parts(tuple(there), whole=False, warnings=(f"{text}{len(parts)} are here",))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more} {'is' if len(names) == 1 else 'are'} missing"


def safetensors_of_folder(path: Path) -> Parts:
    """The .safetensors files that a library loads: model.safetensors, or what an index names, or all there are.

    Raises:
        CannotRun: some are missing, or are no files.
    """
    there = {file.name: file for file in sorted(path.glob("*.safetensors"))}
    index = _index(path)
    if "model.safetensors" in there:
        chosen, index = ["model.safetensors"], {}
    elif index:
        chosen = sorted(set(index.values()))
        if missing := [name for name in chosen if name not in there]:
            raise CannotRun(f"{path} is not complete: of the files that its index names, {_listed(missing)}")
    else:
        chosen = list(there)
    for name in chosen:
        if not regular(there[name]):
            raise CannotRun(f"{there[name]} is no regular file")
        if missing := [part.name for part in siblings(there[name]) if part.name not in there]:
            raise CannotRun(f"{path} is not complete: {name} is there, {_listed(missing)}")
    aside = [name for name in there if name not in chosen]
    notes = (f"Other files beside them, not looked at: {', '.join(aside[:3])}.",) if aside else ()
    return Parts(tuple(there[name] for name in chosen), index=index, notes=notes)


def _index(path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for file in sorted(path.glob("*.safetensors.index.json")):
        named = read_json(file).get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(value, str) for value in named.values()):
            raise CannotRun(f"{file} has no weight_map from tensors to files")
        found |= named
    return found
