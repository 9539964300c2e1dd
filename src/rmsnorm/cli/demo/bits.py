"""The bits of all norms' results on a real model's hidden states: alone and in a batch, by threads and instructions.

The matrix products between the norms are PyTorch's and promise no bits, so the norms are compared on inputs held fixed:
those that the model's own norms see. Another instruction set takes a process of its own, since each process chooses
once: ours by RMSNORM_ISA, PyTorch's by ATEN_CPU_CAPABILITY.
"""

import ctypes
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rmsnorm.cli.demo.model import LanguageModel, replacement
from rmsnorm.ops import library

# Enough for both libraries to divide the rows of one call among threads, few enough to call them one by one.
ROWS = 128
# What PyTorch calls the instructions that ours use; elsewhere its own are left alone.
_ATEN = {"portable": "default", "avx2": "avx2", "avx512": "avx512", "avx512_bf16": "avx512"}
_START = "import sys; sys.path[:] = {path!r}; from rmsnorm.cli.demo import bits; bits.worker({file!r})"

Call = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Site:
    """One norm of the model: its parameters and the hidden states that it sees, shape (rows, width)."""

    weight: Tensor
    eps: float
    x: Tensor

    def norms(self) -> dict[str, Call]:
        """The model's own norm and ours, on this weight."""
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        weight = torch.nn.Parameter(self.weight)
        before = LlamaRMSNorm(weight.numel(), self.eps)
        before.weight = weight
        return {"before": before, "after": replacement(weight, self.eps)}


@dataclass(frozen=True)
class Bits:
    """A hash of all norms' results on the same rows, by condition; `before` the model's own norms, `after` ours."""

    dtype: str
    rows: int
    before: dict[str, str]
    after: dict[str, str]


@torch.inference_mode()
def capture(language: LanguageModel, prompt: Tensor) -> list[Site]:
    """What each norm of the model sees of the first rows of a prompt."""
    sites = []

    def keep(norm: Any, inputs: tuple[Tensor, ...]) -> None:
        sites.append(Site(norm.weight.detach().clone(), norm.variance_epsilon, inputs[0][0].clone()))

    language.use_norms("before")
    hooks = [norm.register_forward_pre_hook(keep) for norm in language.norms["before"].values()]
    language.model(prompt[:, :ROWS])
    for hook in hooks:
        hook.remove()
    return sites


def compare_bits(captured: dict[str, list[Site]]) -> list[Bits]:
    """Hash what the norms make of each dtype's rows, under every condition that this machine has."""
    found = {dtype: _here(sites) for dtype, sites in captured.items()}
    for isa, hashes in _on_other_instructions(captured).items():
        for dtype, of_both in hashes.items():
            for which, digest in of_both.items():
                found[dtype][which][f"in one call, {isa}"] = digest
    return [Bits(dtype, captured[dtype][0].x.shape[0], **found[dtype]) for dtype in captured]


def _here(sites: list[Site]) -> dict[str, dict[str, str]]:
    threads = torch.get_num_threads()
    found: dict[str, dict[str, str]] = {"before": {}, "after": {}}
    try:
        torch.set_num_threads(1)
        _note(found, "each row by itself", sites, lambda norm, x: torch.cat([norm(row) for row in x.split(1)]))
        _note(found, "in one call, 1 thread", sites, lambda norm, x: norm(x))
        torch.set_num_threads(2)
        _note(found, "in one call, 2 threads", sites, lambda norm, x: norm(x))
        _note(found, "last in a batch of 4", sites, lambda norm, x: norm(torch.stack([x.flip(0), x * 2, -x, x]))[-1])
    finally:
        torch.set_num_threads(threads)
    return found


def _note(
    found: dict[str, dict[str, str]], condition: str, sites: list[Site], run: Callable[[Call, Tensor], Tensor]
) -> None:
    for which, digest in _hashes(sites, run).items():
        found[which][condition] = digest


@torch.inference_mode()
def _hashes(sites: Iterable[Site], run: Callable[[Call, Tensor], Tensor]) -> dict[str, str]:
    digests = {"before": hashlib.sha256(), "after": hashlib.sha256()}
    for site in sites:
        for which, norm in site.norms().items():
            y = run(norm, site.x).contiguous()
            digests[which].update(ctypes.string_at(y.data_ptr(), y.nbytes))
    return {which: digest.hexdigest()[:8] for which, digest in digests.items()}


def _on_other_instructions(captured: dict[str, list[Site]]) -> dict[str, dict[str, dict[str, str]]]:
    """Hashes by instruction set, dtype and norms: of all sets of this machine but the one in use, a process each."""
    status = library.status()
    others = [isa for isa in status.isas or () if isa != status.isa]
    if not others:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.pt"
        torch.save({dtype: [vars(site) for site in sites] for dtype, sites in captured.items()}, file)
        code = _START.format(path=sys.path, file=str(file))
        # At once: most of their time goes into starting.
        workers = {isa: _start(code, isa) for isa in others}
        try:
            said = {isa: worker.communicate() for isa, worker in workers.items()}
        finally:
            for worker in workers.values():
                worker.kill()
                worker.wait()
    for isa, worker in workers.items():
        if worker.returncode:
            raise RuntimeError(f"the process for {isa} ended with {worker.returncode}: {said[isa][1].strip()}")
    return {isa: json.loads(output) for isa, (output, _) in said.items()}


def _start(code: str, isa: str) -> "subprocess.Popen[str]":
    aten = {"ATEN_CPU_CAPABILITY": _ATEN[isa]} if isa in _ATEN else {}
    return subprocess.Popen(  # noqa: S603 - this very interpreter
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RMSNORM_ISA": isa, **aten},
    )


def worker(file: str) -> None:
    """Print the hashes of both norms on the rows in a file, by dtype, as JSON."""
    captured = torch.load(file)
    found = {
        dtype: _hashes((Site(**site) for site in sites), lambda norm, x: norm(x)) for dtype, sites in captured.items()
    }
    print(json.dumps(found))
