"""Tensors of checkpoints: which are weights of norms, and their values when they are asked for."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rmsnorm.cli.requirements import CannotRun, require

# More than this in one file, and it is no model; all known ones have a few ten thousand.
MOST_TENSORS = 2**18
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "BOOL": "bool",
    "C64": "complex64",
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}

_NORM = re.compile(r"norm|(^|_)ln(_|\d|$)")
# What stands beside a weight: biases, statistics of batches, the states of optimisers, the scales of quantisation.
_NO_WEIGHT = re.compile(
    r"bias|^beta$|^running_|^num_batches|^exp_avg|^step$|^momentum|^max_exp|^eps"
    r"|(weight|input|output|act|k|v)_scale|scale_inv$|zero_point|zeros$|^absmax|quant_|^g_idx$|^lora_|^mask"
)
_PLAIN = ("weight", "scale", "gamma", "gain", "g", "w")
_MATRIX = re.compile(r"(proj|projection|linear|fc|dense|conv|emb|embed|embeddings?|lora_?\w*|mlp)[\d_]*$")


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a file or a model. `read` gives its values; what it raises says why there are none."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Tensor]

    @property
    def count(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)


def norm_weights(shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Which tensors are weights of RMSNorms, by names and shapes: without code to run there is nothing better.

    A norm with a bias is a LayerNorm, one with running statistics a BatchNorm.
    """
    return [name for name, shape in shapes.items() if _is_norm(name, shape) and not _is_other(name, shapes)]


def _is_norm(name: str, shape: Sequence[int]) -> bool:
    parts = name.lower().split(".")
    leaf = parts[-1]
    if _NO_WEIGHT.search(leaf):
        return False
    if len(shape) == 1:
        return any(map(_NORM.search, parts))
    owner = parts[-2] if leaf in _PLAIN and len(parts) > 1 else leaf
    return bool(_NORM.search(owner)) and not _MATRIX.search(owner) and (len(shape) > 1 or leaf in _PLAIN)


def _is_other(name: str, shapes: Mapping[str, Sequence[int]]) -> bool:
    owner, dot, leaf = name.rpartition(".")
    companions = ("bias", "beta", "running_mean", leaf.replace("weight", "bias"))
    return any(f"{owner}{dot}{companion}" in shapes for companion in companions if companion != leaf)


def read_safetensors(path: Path) -> dict[str, Stored]:
    """Every tensor of a .safetensors file; nothing but its header is read before values are asked for.

    Raises:
        CannotRun: it is damaged.
    """
    require("demo", "safetensors")
    from safetensors import SafetensorError, safe_open

    try:
        # It checks all of the header. For torch it would map the file as if to write, which asks for as much memory.
        with safe_open(path, framework="numpy"):
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except OSError as error:
        raise CannotRun(f"{path} cannot be read: {error.strerror or error}") from None
    except (SafetensorError, ValueError) as error:
        pointer = "a pointer of Git LFS: fetch the file itself" if _is_pointer(path) else str(error)
        raise CannotRun(f"{path} is no sound .safetensors file: {pointer}") from None
    header.pop("__metadata__", None)
    if len(header) > MOST_TENSORS:
        raise CannotRun(f"{path} has {len(header)} tensors, more than any model")
    found = {}
    for name, entry in sorted(header.items()):
        dtype = _DTYPES.get(entry["dtype"], entry["dtype"])
        first, last = (8 + length + offset for offset in entry["data_offsets"])
        found[name] = Stored(name, tuple(entry["shape"]), dtype, partial(_read_bytes, path, dtype, first, last))
    return found


def _read_bytes(path: Path, dtype: str, first: int, last: int) -> Tensor:
    known = getattr(torch, dtype, None)
    if not isinstance(known, torch.dtype):
        raise ValueError("torch has no such type")
    with path.open("rb") as file:
        file.seek(first)
        data = bytearray(file.read(last - first))
    return torch.frombuffer(data, dtype=known) if data else torch.empty(0, dtype=known)


def _is_pointer(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(8) == b"version "


def of_module(name: str, t: Tensor) -> Stored:
    """A weight that a module holds."""

    def read() -> Tensor:
        if t.layout is torch.strided and t.numel() and not t.untyped_storage().nbytes():
            raise ValueError("its storage was freed")
        return t.detach()

    return Stored(name, tuple(t.shape), str(t.dtype).removeprefix("torch."), read)
