"""Reads the weights of norms out of checkpoint files, and nothing else of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from rmsnorm.cli.requirements import CannotRun, require

GGUF_EPS = ".attention.layer_norm_rms_epsilon"
_LARGEST_HEADER = 100_000_000
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def norm_weights(shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Which tensors are weights of RMSNorms, by names and shapes: without code to run there is nothing better.

    A norm with a bias is a LayerNorm.
    """
    return [name for name, shape in shapes.items() if _is_norm(name, shape) and _bias_of(name) not in shapes]


def _is_norm(name: str, shape: Sequence[int]) -> bool:
    parts = name.lower().split(".")
    return (
        parts[-1] != "bias"
        and len(shape) == 1
        and shape[0] > 0
        and any("norm" in part or part in ("ln_f", "ln") for part in parts)
    )


def _bias_of(name: str) -> str:
    return f"{name.rpartition('.')[0]}.bias"


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The norms' weights in a .safetensors file: 8 bytes of length, a header in JSON, then the tensors' bytes."""
    try:
        with path.open("rb") as file:
            header = _header(path, file)
            first = file.tell()
            found = {}
            for name in norm_weights({name: entry.shape for name, entry in header.items()}):
                entry = header[name]
                if entry.dtype not in _DTYPES:
                    continue
                file.seek(first + entry.begin)
                data = bytearray(file.read(entry.end - entry.begin))
                if len(data) != entry.end - entry.begin:
                    raise CannotRun(f"{path} is cut short: {name} is missing")
                dtype = _DTYPES[entry.dtype]
                if len(data) != entry.shape[0] * dtype.itemsize:
                    raise CannotRun(
                        f"{path}: {name} has {len(data)} bytes, not those of {entry.shape[0]} {entry.dtype}"
                    )
                found[name] = torch.frombuffer(data, dtype=dtype)
    except OSError as error:
        raise CannotRun(f"{path} cannot be read: {error.strerror}") from None
    return found


class _Entry(NamedTuple):
    dtype: str
    shape: list[int]
    begin: int
    end: int


def _header(path: Path, file: BinaryIO) -> dict[str, _Entry]:
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= min(_LARGEST_HEADER, path.stat().st_size - 8):
        raise CannotRun(f"{path} is no .safetensors file: its header would have {length} bytes")
    try:
        header = json.loads(file.read(length))
    except (ValueError, RecursionError):
        raise CannotRun(f"{path} is no .safetensors file: its header is not JSON") from None
    if not isinstance(header, dict):
        raise CannotRun(f"{path} is no .safetensors file: its header is no JSON object")
    header.pop("__metadata__", None)
    try:
        entries = {name: _Entry(e["dtype"], e["shape"], *e["data_offsets"]) for name, e in header.items()}
        sound = all(isinstance(e.dtype, str) and 0 <= e.begin <= e.end for e in entries.values())
        sound = sound and all(isinstance(size, int) for e in entries.values() for size in e.shape)
    except (TypeError, KeyError):
        sound = False
    if not sound:
        raise CannotRun(f"{path} is no .safetensors file: its header does not say what its tensors are")
    return entries


def read_gguf(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The norms' weights in a GGUF file, and its fields of one value."""
    require("demo", "gguf")
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType

    class Reader(GGUFReader):
        """Says when a file is shorter than it says, where its base goes on with nothing."""

        def _get(self, offset: int, dtype: Any, count: int = 1, *more: Any, **others: Any) -> Any:
            if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise ValueError(f"it is cut short, after {len(self.data)} bytes")
            return super()._get(offset, dtype, count, *more, **others)

    try:
        reader = Reader(str(path))
        single = {key: field for key, field in reader.fields.items() if GGUFValueType.ARRAY not in field.types[:1]}
        fields = {key: field.contents() for key, field in single.items()}
        tensors = {}
        for name in norm_weights({t.name: list(map(int, t.shape)) for t in reader.tensors}):
            (t,) = (t for t in reader.tensors if t.name == name)
            data = torch.from_numpy(t.data.copy())
            if t.tensor_type == GGMLQuantizationType.BF16:
                data = data.view(torch.bfloat16)
            if data.is_floating_point():
                tensors[name] = data
    except Exception as error:  # a damaged file has it fail in any way
        raise CannotRun(f"{path} cannot be read as GGUF: {str(error) or type(error).__name__}") from None
    return tensors, fields
