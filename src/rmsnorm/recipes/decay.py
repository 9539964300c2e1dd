"""Gains without weight decay."""

from __future__ import annotations

from typing import Any

from torch import nn

from rmsnorm.recipes.finding import norms_of


def param_groups(model: nn.Module, *, weight_decay: float, vectors: bool = False) -> list[dict[str, Any]]:
    """The parameters of a model for an optimizer: the gains of its RMSNorms without weight decay, all others with it.

    Decay pulls a gain towards 0, which scales a whole layer down instead of making weights small.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8))
    >>> optimizer = torch.optim.AdamW(param_groups(model, weight_decay=0.1))
    >>> [(group["weight_decay"], group["names"]) for group in optimizer.param_groups]
    [(0.1, ['0.weight', '0.bias']), (0.0, ['1.weight'])]

    Args:
        model: norms in it are found by what they compute, whatever they and their weights are called.
        weight_decay: of everything else.
        vectors: also leaves out what else has fewer than two dimensions: biases, gains of other norms.

    Returns:
        Two groups, in the order of `model.named_parameters()`, each with `names` beside `params`; frozen parameters are
        in none.

    Raises:
        ValueError: a weight_decay below 0; or a norm whose weight is not at hand (inside a flat parameter of FSDP 1).
    """
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must be 0 or more, got {weight_decay!r}")
    gains = set()
    for norm in norms_of(model):
        if "flat parameter" in norm.reason:
            raise ValueError(f"{norm.name}: {norm.reason.replace('patch', 'make the groups')}")
        gains.add(id(norm.gain))
    groups: list[dict[str, Any]] = [{"params": [], "names": [], "weight_decay": d} for d in (float(weight_decay), 0.0)]
    for name, p in model.named_parameters():
        if p.requires_grad:
            group = groups[id(p) in gains or (vectors and p.dim() < 2)]
            group["params"].append(p)
            group["names"].append(name)
    return groups
