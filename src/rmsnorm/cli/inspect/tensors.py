"""Reads the weights of norms out of checkpoint files, and nothing else of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rmsnorm.cli.requirements import CannotRun, require

GGUF_EPS = ".attention.layer_norm_rms_epsilon"
_LARGEST_HEADER = 100_000_000
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def is_norm(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is the weight of a norm, by its name and shape: without code to run there is nothing better."""
    parts = name.lower().split(".")
    return parts[-1] != "bias" and len(shape) == 1 and any("norm" in part or part in ("ln_f", "ln") for part in parts)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The norms' weights in a .safetensors file: 8 bytes of length, a header in JSON, then the tensors' bytes."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(_LARGEST_HEADER, path.stat().st_size - 8):
            raise CannotRun(f"{path} is no .safetensors file: its header would have {length} bytes")
        try:
            header = json.loads(file.read(length))
        except ValueError:
            raise CannotRun(f"{path} is no .safetensors file: its header is not JSON") from None
        found = {}
        for name, entry in header.items():
            if name == "__metadata__" or entry["dtype"] not in _DTYPES or not is_norm(name, tuple(entry["shape"])):
                continue
            begin, end = entry["data_offsets"]
            file.seek(8 + length + begin)
            data = bytearray(file.read(end - begin))
            if len(data) != end - begin or not data:
                raise CannotRun(f"{path} is cut short: {name} is missing")
            found[name] = torch.frombuffer(data, dtype=_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return found


def read_gguf(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The norms' weights in a GGUF file, and its fields of one value."""
    require("demo", "gguf")
    from gguf import GGUFReader, GGUFValueType

    try:
        reader = GGUFReader(str(path))
    except (ValueError, OSError) as error:
        raise CannotRun(f"{path} cannot be read as GGUF: {error}") from None
    tensors = {
        t.name: torch.from_numpy(t.data.copy())
        for t in reader.tensors
        if is_norm(t.name, tuple(t.shape)) and t.data.dtype.kind == "f"
    }
    single = {key: field for key, field in reader.fields.items() if field.types != [GGUFValueType.ARRAY]}
    return tensors, {key: field.contents() for key, field in single.items() if field.types[0] != GGUFValueType.ARRAY}
