"""Gains inside the linear layers that take the norm's result: W (g * n) = (W * g) n."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from rmsnorm.module import GatedRMSNorm, RMSNorm
from rmsnorm.recipes.consumers import Uses
from rmsnorm.recipes.finding import Norm, norms_of
from rmsnorm.recipes.outcome import Outcome, Step
from rmsnorm.recipes.replacement import CannotReplace, exchange, replacement

# In the trial everything is float64 but what other people's norms compute in float32: half of its digits are asked for.
_AGREEMENT = 2.0**-12


def fold_into_linear(model: nn.Module, *arguments: Any, **keywords: Any) -> Outcome:
    """Multiplies the gains of a model's norms into the linear layers behind them; the norms have no weight afterwards.

    For quantisers and exporters: one vector less, and its outliers where scales are chosen. A norm is folded if nothing
    but linear layers takes its result, and these take nothing else and share their weights with nobody. An offset is
    part of the gain. A folded weight is rounded once, to its own dtype.

    >>> model = nn.Sequential(nn.RMSNorm(8, eps=1e-6), nn.Linear(8, 8))
    >>> outcome = fold_into_linear(model, torch.randn(2, 8))
    >>> model[0]
    RMSNorm(8, eps=1e-06, elementwise_affine=False)
    >>> [step.said for step in outcome.done]
    ['into 1']
    >>> outcome.undo()

    Which layers take what is found by running a copy of the model in float64, with random gains, on the inputs given.
    The copy is then folded and must give the same result, or nothing is done.

    Args:
        model: any model; a part of it that these inputs do not reach is left alone.
        arguments, keywords: of a call of it. Floating-point tensors among them become float64 for the copy.

    Returns:
        What was folded and what was not, with `undo()`.

    Raises:
        ValueError: the folded copy gives another result.
    """
    found = list(norms_of(model))
    trial = copy.deepcopy(model).double().eval()
    arguments, keywords = tree_map(_double, (arguments, keywords))
    consumers, refused = _examined(trial, found, arguments, keywords)
    steps, undo = [], []
    for norm in found:
        reason = refused.get(norm.name)
        if reason is None:
            undo.append(_fold(model, norm.name, consumers[norm.name], replacement(model, norm)))
            reason = ""
        into = f"into {', '.join(consumers.get(norm.name, ()))}"
        steps.append(Step(norm.name, norm.class_name, not reason, reason or into))

    def back() -> None:
        for step in reversed(undo):
            step()

    return Outcome("folded", steps, back, "a copy in float64, folded with random gains, gives the same result")


def _examined(
    trial: nn.Module, found: list[Norm], arguments: Any, keywords: Any
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The layers that take each norm's result, and why a norm is not folded; tried out on the copy."""
    refused: dict[str, str] = {}
    made: dict[str, RMSNorm] = {}
    generator = torch.Generator().manual_seed(0)
    for norm in found:
        try:
            norm = norm._replace(module=trial.get_submodule(norm.name))
            ours = replacement(trial, norm)
            if not isinstance(ours, RMSNorm) or ours.memory_efficient:
                raise CannotReplace("it has a gate" if not isinstance(ours, RMSNorm) else "it is memory_efficient")
            made[norm.name] = ours
            weight = ours.weight
            if weight is not None:
                gains = torch.rand(weight.shape, generator=generator, dtype=torch.float64) + 0.5 - ours.weight_offset
                weight.data.copy_(gains)
        except CannotReplace as reason:
            refused[norm.name] = str(reason)
    modules = dict(trial.named_modules())
    linears = {name: m for name, m in modules.items() if isinstance(m, nn.Linear)}
    uses = Uses({name: modules[name] for name in made}, linears)
    wanted = uses.run(trial, arguments, keywords)
    held = Counter(id(p) for m in trial.modules() for p in m._parameters.values() if p is not None)
    takers = Counter(name for names in uses.linear.values() for name in names)
    for name, ours in made.items():
        taking = uses.linear[name]
        if other := uses.others.get(name):
            refused[name] = f"its result is also taken by {other}"
        elif not taking:
            refused[name] = "no linear layer took its result"
        elif held[id(ours.weight)] > 1:
            refused[name] = "its weight is shared"
        for taker in taking:
            linear = linears[taker]
            if type(linear).forward is not nn.Linear.forward or "forward" in vars(linear):
                refused.setdefault(name, f"{taker} is no ordinary linear layer")
            elif "weight" not in linear._parameters or held[id(linear.weight)] > 1:
                refused.setdefault(name, f"the weight of {taker} is tied to another module's")
            elif taker in uses.mixed or takers[taker] > 1:
                refused.setdefault(name, f"{taker} also takes something else")
            elif linear.in_features != ours.normalized_shape[-1] or len(ours.normalized_shape) > 1:
                refused.setdefault(name, f"{taker} takes rows of another size")
    for name, ours in made.items():
        if name not in refused:
            _fold(trial, name, uses.linear[name], ours)
    with torch.no_grad():
        got = trial(*arguments, **keywords)
    _compare(got, wanted)
    return uses.linear, refused


def _fold(model: nn.Module, name: str, takers: list[str], ours: RMSNorm | GatedRMSNorm) -> Callable[[], None]:
    """Folds one norm, whose replacement is given; returns what undoes it."""
    old = model.get_submodule(name)
    parameter = ours.weight
    assert parameter is not None  # noqa: S101 - `replacement` refuses norms without one
    wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    gain = parameter.detach().to(wide) + ours.weight_offset
    linears: list[nn.Linear] = [model.get_submodule(taker) for taker in takers]  # type: ignore[misc]
    before = [linear.weight.detach().clone() for linear in linears]
    for linear in linears:
        linear.weight.data.copy_(linear.weight.detach().to(wide) * gain)
    written = [linear.weight.detach().clone() for linear in linears]
    bare = RMSNorm(parameter.numel(), ours.eps, elementwise_affine=False, group_size=ours.group_size)
    exchange(model, old, bare)

    def revert() -> None:
        for linear, was, folded in zip(linears, before, written, strict=True):
            now = linear.weight.detach()
            linear.weight.data.copy_(was if torch.equal(now, folded.to(now.device)) else now.to(wide) / gain)
        exchange(model, bare, old)

    return revert


def _double(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _compare(got: Any, wanted: Any) -> None:
    for a, b in zip(tree_leaves(got), tree_leaves(wanted), strict=True):
        if isinstance(a, Tensor) and a.is_floating_point():
            apart = (a.double() - b.double()).abs().max() if a.numel() else torch.zeros(())
            if not apart <= _AGREEMENT * b.double().abs().max():
                raise ValueError(f"nothing was folded: a folded copy gives another result, {float(apart):.3g} apart")
