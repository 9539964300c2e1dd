"""A whole model's gains: in float32, or as offsets from one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rmsnorm.module import GatedRMSNorm, RMSNorm
from rmsnorm.patching.convention import short
from rmsnorm.patching.convert import fold_offset, unfold_offset
from rmsnorm.recipes.finding import Norm, norms_of
from rmsnorm.recipes.outcome import Outcome, Step
from rmsnorm.recipes.replacement import CannotReplace, exchange, replacement

Ours = RMSNorm | GatedRMSNorm
# Changes a replacement; returns its new weight, what is to be said, and how a weight goes back.
Change = Callable[[Ours], tuple[Tensor, str, Callable[[Tensor], Tensor]]]


def float32_weights(model: nn.Module) -> Outcome:
    """Keeps the gains of a 16-bit model in float32, beside 16-bit activations.

    Each norm with 16-bit weights is replaced by this library's, which holds the same parameter object, now in float32,
    and rounds once: its result keeps the dtype of its input, where a product of a 16-bit value and a float32 gain would
    become float32. The gains are what they were; results differ by roundings that no longer happen.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8, eps=1e-6)).bfloat16()
    >>> print(float32_weights(model))
    1 norms with float32 gains, 0 left alone
      1 (RMSNorm): bfloat16 gains now in float32
    >>> model(torch.zeros(1, 8, dtype=torch.bfloat16)).dtype
    torch.bfloat16

    Returns:
        What was done, with `undo()`.

    Raises:
        ValueError: a gain has a gradient already: do this before the first backward, or after `zero_grad()`.
    """

    def change(made: Ours) -> tuple[Tensor, str, Callable[[Tensor], Tensor]]:
        weight = _weight(made)
        dtype = weight.dtype
        if dtype not in (torch.bfloat16, torch.float16):
            raise CannotReplace(f"its gains are {short(dtype)} already")
        said = f"{short(dtype)} gains now in float32"
        if made.rounding != "once":
            said += f", rounded once where it was {made.rounding}"
            made.rounding = "once"
        return weight.detach().float(), said, lambda w: w.to(dtype)

    return _changed(model, "with float32 gains", change)


def to_offset(model: nn.Module) -> Outcome:
    """Stores the gains of a model as offsets from one: weight - 1, in the weights' own dtype.

    Gains near one then have far finer steps than bfloat16's 2^-7. Each norm is replaced by this library's with
    `weight_offset=1.0`, which holds the same parameter object; names in `state_dict` stay, values do not.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8, eps=1e-6))
    >>> outcome = to_offset(model)
    >>> model[1]
    RMSNorm(8, eps=1e-06, weight_offset=1.0)
    >>> bool(model[1].weight.any())
    False
    >>> outcome.undo()
    >>> model[1]
    RMSNorm((8,), eps=1e-06, elementwise_affine=True)

    Returns:
        What was done and which gains were rounded, with `undo()`.

    Raises:
        ValueError: a gain has a gradient already.
    """

    def change(made: Ours) -> tuple[Tensor, str, Callable[[Tensor], Tensor]]:
        if made.weight_offset:
            raise CannotReplace(f"its gains are offsets from {made.weight_offset:g} already")
        made.weight_offset = 1.0
        converted = unfold_offset(_weight(made))
        return converted.weight, str(converted), lambda w: fold_offset(w, dtype=w.dtype).weight

    return _changed(model, "with gains as offsets from one", change)


def from_offset(model: nn.Module) -> Outcome:
    """Stores gains that are offsets (Gemma) as they are: weight + offset, in the weights' own dtype.

    The way back from `to_offset`, and what exporters and kernels without an offset need. In 16 bits a gain near one
    keeps fewer digits than its offset had: the outcome says which were rounded, and `float32_weights` first keeps all.

    >>> from rmsnorm import RMSNorm
    >>> model = nn.Sequential(nn.Linear(8, 8), RMSNorm(8, weight_offset=1.0))
    >>> print(from_offset(model))
    1 norms with plain gains, 0 left alone
      1 (RMSNorm): all 8 gains are exactly what they were

    Returns:
        What was done and which gains were rounded, with `undo()`.

    Raises:
        ValueError: a gain has a gradient already.
    """

    def change(made: Ours) -> tuple[Tensor, str, Callable[[Tensor], Tensor]]:
        offset = made.weight_offset
        if not offset:
            raise CannotReplace("its gains are no offsets")
        made.weight_offset = 0.0
        weight = _weight(made)
        converted = fold_offset(weight, offset, dtype=weight.dtype)
        return converted.weight, str(converted), lambda w: unfold_offset(w, offset).weight

    return _changed(model, "with plain gains", change)


def _weight(made: Ours) -> Tensor:
    assert made.weight is not None  # noqa: S101 - `replacement` refuses norms without one
    return made.weight


def _changed(model: nn.Module, title: str, change: Change) -> Outcome:
    found = list(norms_of(model))
    for norm in found:
        if isinstance(norm.gain, Tensor) and norm.gain.grad is not None:
            raise ValueError(f"{norm.name}.weight has a gradient: do this before the backward, or after zero_grad()")
    steps: list[Step] = []
    undo: list[Callable[[], None]] = []
    converted: dict[int, str] = {}
    for norm in found:
        try:
            steps.append(_change_one(model, norm, change, undo, converted))
        except CannotReplace as reason:
            steps.append(Step(norm.name, norm.class_name, False, str(reason)))

    def back() -> None:
        for step in reversed(undo):
            step()

    return Outcome(title, steps, back)


def _change_one(
    model: nn.Module,
    norm: Norm,
    change: Change,
    undo: list[Callable[[], None]],
    converted: dict[int, str],
) -> Step:
    made = replacement(model, norm)
    parameter = _weight(made)
    if id(parameter) in converted:
        raise CannotReplace(f"it shares its weight with {converted[id(parameter)]}")
    before = parameter.detach().clone()
    weight, said, back = change(made)
    converted[id(parameter)] = norm.name
    written = weight.clone()
    parameter.data = weight
    exchange(model, norm.module, made)

    def revert() -> None:
        now = parameter.detach()
        unchanged = now.dtype == written.dtype and torch.equal(now, written.to(now.device))
        parameter.data = before.to(now.device) if unchanged else back(now)
        parameter.grad = None
        exchange(model, made, norm.module)

    undo.append(revert)
    return Step(norm.name, norm.class_name, True, said)
