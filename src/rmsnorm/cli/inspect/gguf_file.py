"""Reads GGUF: its fields of one value, and its tensors when their values are asked for.

The reader of the package gguf makes an array of each element of each list, and takes lengths as they stand: a small
hostile file takes all memory, and a sound one seconds. Here lists are skipped; names of types, sizes of blocks and the
decoding of blocks are the package's.
"""

from __future__ import annotations

import io
import math
import struct
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from rmsnorm.cli.inspect.tensors import MOST_TENSORS, Stored
from rmsnorm.cli.requirements import CannotRun, require

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
_PLAIN = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_PLAIN |= {f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)}
# Vocabularies have up to a million entries, and as many merges; templates of chats are the longest texts.
_MOST_ENTRIES, _MOST_FIELDS, _LONGEST_TEXT, _DEEPEST_LIST, _MOST_DIMENSIONS = 2**23, 2**16, 2**24, 4, 8


@dataclass(frozen=True)
class Gguf:
    """A GGUF file: fields of one value, and tensors."""

    fields: dict[str, Any]
    tensors: dict[str, Stored]


class _Damaged(Exception):
    """The file is not what it says."""


class _Cursor:
    """Reads one value after the other, never beyond the end."""

    def __init__(self, file: BinaryIO, size: int, order: str = "<") -> None:
        self.file, self.size, self.order, self.entries = file, size, order, 0

    def number(self, code: str) -> Any:
        values = struct.unpack(f"{self.order}{code}", self.take(struct.calcsize(f"<{code}")))
        return values[0]

    def take(self, count: int) -> bytes:
        data = self.file.read(count)
        if len(data) < count:
            raise _Damaged(f"it is cut short, after {self.size} bytes")
        return data

    def skip(self, count: int) -> None:
        if count > self.size - self.file.tell():
            raise _Damaged(f"it is cut short, after {self.size} bytes")
        self.file.seek(count, io.SEEK_CUR)

    def text(self) -> str:
        length = self.number("Q")
        if length > min(_LONGEST_TEXT, self.size):
            raise _Damaged(f"it has a text of {length} bytes")
        return self.take(length).decode("utf-8", "backslashreplace")

    def value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind not in _NUMBERS:
            raise _Damaged(f"it has a field of type {kind}")
        return self.number(_NUMBERS[kind])

    def skip_list(self, depth: int = 1) -> None:
        kind, count = self.number("I"), self.number("Q")
        if kind in _NUMBERS:
            self.skip(count * struct.calcsize(f"<{_NUMBERS[kind]}"))
            return
        self.entries += count
        if kind not in (_TEXT, _LIST) or self.entries > _MOST_ENTRIES or depth > _DEEPEST_LIST:
            raise _Damaged(f"it has a list of {count} values of type {kind}")
        for _ in range(count):
            if kind == _TEXT:
                self.skip(self.number("Q"))
            else:
                self.skip_list(depth + 1)


def read_gguf(path: Path) -> Gguf:
    """The fields and tensors of a GGUF file.

    Raises:
        CannotRun: it is damaged.
    """
    require("demo", "gguf")
    try:
        with path.open("rb") as file:
            return _read(path, _Cursor(file, path.stat().st_size))
    except OSError as error:
        raise CannotRun(f"{path} cannot be read: {error.strerror}") from None
    except _Damaged as error:
        raise CannotRun(f"{path} cannot be read as GGUF: {error}") from None


def _read(path: Path, cursor: _Cursor) -> Gguf:
    if cursor.file.read(4) != b"GGUF":
        raise _Damaged("it does not begin with GGUF")
    version = cursor.number("I")
    if version and not version % 2**16:  # written by a machine of the other byte order
        cursor.order = ">"
        version = int.from_bytes(version.to_bytes(4, "little"), "big")
    if version not in (2, 3):
        raise _Damaged(f"it is of version {version}; those of 2 and 3 can be read")
    tensors, fields = cursor.number("Q"), cursor.number("Q")
    if tensors > MOST_TENSORS or fields > _MOST_FIELDS:
        raise _Damaged(f"it would have {tensors} tensors and {fields} fields")
    values = _fields(cursor, fields)
    entries = [_entry(cursor) for _ in range(tensors)]
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise _Damaged(f"its alignment is {alignment}")
    start = -(-cursor.file.tell() // alignment) * alignment
    found = {}
    for name, shape, kind, offset in entries:
        if name in found:
            raise _Damaged(f"it has two tensors called {name}")
        found[name] = _stored(path, cursor, name, shape, kind, start + offset)
    return Gguf(values, found)


def _fields(cursor: _Cursor, count: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for _ in range(count):
        key, kind = cursor.text(), cursor.number("I")
        if kind == _LIST:
            cursor.skip_list()
        elif key in values:
            raise _Damaged(f"it has two fields called {key}")
        else:
            values[key] = cursor.value(kind)
    return values


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, dimensions = cursor.text(), cursor.number("I")
    if dimensions > _MOST_DIMENSIONS:
        raise _Damaged(f"{name} would have {dimensions} dimensions")
    # The fastest one comes first.
    shape = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]
    return name, shape, cursor.number("I"), cursor.number("Q")


def _stored(path: Path, cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int, begin: int) -> Stored:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    known = {int(member): member for member in GGMLQuantizationType}.get(kind)
    if known is None:
        return Stored(name, shape, f"type {kind}", partial(_unknown, kind))
    block, size = GGML_QUANT_SIZES[known]
    dtype = _PLAIN.get(known.name, known.name)
    count = math.prod(shape)
    blocks, rest = divmod(count, block)
    if rest:
        raise _Damaged(f"{name} has {count} elements, not whole blocks of {known.name}")
    if begin + blocks * size > cursor.size:
        raise _Damaged(f"it is cut short: {name} is missing")
    return Stored(name, shape, dtype, partial(_decoded, path, known, count, begin, cursor.order))


def _unknown(kind: int) -> Tensor:
    raise ValueError(f"the package gguf does not know type {kind}")


def _decoded(path: Path, kind: Any, count: int, begin: int, order: str) -> Tensor:
    import numpy as np
    from gguf import GGML_QUANT_SIZES, dequantize

    block, size = GGML_QUANT_SIZES[kind]
    with path.open("rb") as file:
        file.seek(begin)
        data = np.frombuffer(bytearray(file.read(count // block * size)), dtype=np.uint8).reshape(-1, size)
    if order == ">" and block > 1:
        raise ValueError(f"blocks of {kind.name} in the other byte order")
    if kind.name in _PLAIN:
        data = np.ascontiguousarray(data[:, ::-1] if order == ">" else data)
        return torch.from_numpy(data).flatten().view(getattr(torch, _PLAIN[kind.name]))
    return torch.from_numpy(np.ascontiguousarray(dequantize(data, kind))).flatten()
