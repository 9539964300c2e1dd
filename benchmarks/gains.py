"""`python -m benchmarks.gains` draws benchmarks/results/gains.svg, the picture of docs/recipes.md.

A norm learns gains between 0.9 and 1.1 with AdamW at a rate of 1e-3: in bfloat16, and by each of the three cures.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from torch import nn

import rmsnorm

PICTURE = Path(__file__).parent / "results" / "gains.svg"
STEPS, DIM = 200, 64


def learn(prepare: Callable[[nn.Module], object], dtype: torch.dtype = torch.bfloat16) -> list[float]:
    """The mean distance of the gains from those that are to be learnt, before each step."""
    torch.manual_seed(0)
    model = nn.Sequential(rmsnorm.RMSNorm(DIM)).to(dtype)
    prepare(model)
    wanted = torch.empty(DIM).uniform_(0.9, 1.1)
    optimizer = torch.optim.AdamW(rmsnorm.param_groups(model, weight_decay=0.1), lr=1e-3)
    apart = []
    for _ in range(STEPS):
        norm = model[0]
        apart.append(float((norm.weight.detach().float() + norm.weight_offset - wanted).abs().mean()))
        x = torch.randn(256, DIM)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            y = model(x.bfloat16())
        loss = (y.float() - rmsnorm.rms_norm(x, wanted)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return apart


def curves() -> dict[str, list[float]]:
    """By what was done to the model."""
    return {
        "bfloat16": learn(lambda model: None),
        "float32_weights(model)": learn(rmsnorm.float32_weights),
        "to_offset(model)": learn(rmsnorm.to_offset),
        "float32 model, autocast": learn(lambda model: None, torch.float32),
    }


def main() -> None:
    styles = ("-", "-", "--", ":")
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "rmsnorm", "font.family": "sans-serif"}):
        figure = Figure(figsize=(7, 3.5), layout="constrained")
        axes = figure.add_subplot()
        for (name, apart), style in zip(curves().items(), styles, strict=True):
            axes.plot(apart, style, label=name)
        axes.set(xlabel="steps of AdamW, lr=1e-3", ylabel="mean distance of the gains", ylim=(0, None))
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
