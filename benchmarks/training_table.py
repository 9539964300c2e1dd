"""The part of docs/benchmarks.md about a training step of a whole model, from benchmarks/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("results") / "model-training-1-thread.jsonl"


def words() -> str:
    about, *steps = _lines()
    first = steps[0]
    return (
        f"{first['model']}: {first['tokens']} tokens, {first['threads']} thread, forward, backward and AdamW, on "
        f"{about['about']['processor']}. Time is ours as a multiple of the step on the model's own norms, and is "
        "called noise where the quartiles of the two overlap; memory is the most that tensors of a step take at a "
        "time, beyond weights, gradients and what the optimizer keeps. Norms are a small part of such a step: what is "
        "gained is the memory of what they keep for backward, and next to nothing of that where activations are "
        "computed again."
    )


def table() -> list[str]:
    """A row for each precision, without and with checkpointing."""
    _, *steps = _lines()
    rows: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for step in steps:
        rows.setdefault((step["precision"], "yes" if step["checkpointing"] else "no"), {})[step["norms_are"]] = step
    lines = ["| precision | checkpointing | time | own norms, MB | ours, MB |", "| --- | --- | --- | ---: | ---: |"]
    for key, both in rows.items():
        own, ours = both["before"], both["after"]
        overlap = ours["whole"]["low"] <= own["whole"]["high"] and own["whole"]["low"] <= ours["whole"]["high"]
        time = f"{ours['whole']['median'] / own['whole']['median']:.2f}{', noise' if overlap else ''}"
        memory = (f"{step['peak'] / 2**20:,.1f}" for step in (own, ours))
        lines.append(f"| {' | '.join(key)} | {time} | {' | '.join(memory)} |")
    return lines


def _lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
