"""The gated and grouped operators `torch.ops.rmsnorm.gated_*`: as library.py, with gated_reference.py as the reference.

    gated_forward(x, gate, weight, eps, weight_offset, rounding, group_size, activation, norm_before_gate) -> y
    gated_forward_train(...) -> (y, rstd)
    gated_backward(dy, x, gate, rstd, weight, weight_offset, group_size, activation, norm_before_gate,
                   need_dx, need_dgate, need_dweight) -> (dx, dgate, dweight)

Below, *options are all that comes after the tensors. `rounding` and `activation` are indices into
`reference.ROUNDINGS` and `gated_reference.ACTIVATIONS`. Without a gate, groups of the row are all that differs from
the plain operators. What is not needed comes back as an empty vector.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rmsnorm import checks, gpu
from rmsnorm.numerics import gated_reference, reference
from rmsnorm.ops.library import Operators, _library, check, laid_out_like, like

_SCHEMAS = """
gated_forward(Tensor x, Tensor? gate, Tensor? weight, float eps, float weight_offset, int rounding, int group_size, int activation, bool norm_before_gate) -> Tensor
gated_forward_train(Tensor x, Tensor? gate, Tensor? weight, float eps, float weight_offset, int rounding, int group_size, int activation, bool norm_before_gate) -> (Tensor y, Tensor rstd)
gated_backward(Tensor dy, Tensor x, Tensor? gate, Tensor rstd, Tensor? weight, float weight_offset, int group_size, int activation, bool norm_before_gate, bool need_dx, bool need_dgate, bool need_dweight) -> (Tensor dx, Tensor dgate, Tensor dweight)
"""  # noqa: E501

# eps, weight_offset, rounding, group_size, activation, norm_before_gate
Options = tuple[float, float, int, int, int, bool]


def named(options: Options) -> tuple[float, float, str, int, str, bool]:
    """The options as the reference and the formula take them: names instead of indices."""
    eps, weight_offset, rounding, group_size, activation, norm_before_gate = options
    names = reference.ROUNDINGS[rounding], gated_reference.ACTIVATIONS[activation]
    return eps, weight_offset, names[0], group_size, names[1], norm_before_gate


def _check(x: Tensor, gate: Tensor | None, weight: Tensor | None, options: Options) -> None:
    """What the kernels check: plain PyTorch would broadcast, truncate and go on."""
    eps, weight_offset, _, group_size, _, _ = options
    check(x, weight, eps, weight_offset)
    checks.check_group_size(group_size, x.shape[-1])
    if gate is not None:
        checks.check_gate(gate, x)


def gated_forward(x: Tensor, gate: Tensor | None, weight: Tensor | None, *options: Any) -> Tensor:
    return gated_forward_train(x, gate, weight, *options)[0]


def gated_forward_train(x: Tensor, gate: Tensor | None, weight: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    _check(x, gate, weight, options)
    y, rstd = gated_reference.forward(x, gate, weight, *named(options))
    return laid_out_like(x, y), rstd.contiguous()


def gated_backward(
    dy: Tensor, x: Tensor, gate: Tensor | None, rstd: Tensor, weight: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    weight_offset, group_size, activation, norm_before_gate, need_dx, need_dgate, need_dweight = options
    name = gated_reference.ACTIVATIONS[activation]
    dx, dgate, dweight = gated_reference.backward(
        dy, x, gate, rstd, weight, weight_offset, group_size, name, norm_before_gate
    )
    return (
        laid_out_like(x, dx) if need_dx else dx.new_empty(0),
        laid_out_like(x, dgate) if need_dgate and dgate is not None else dx.new_empty(0),
        dweight if need_dweight else dweight.new_empty(0),
    )


# ---------------------------------------------------------------- shapes, for tracing


def _fake_gated_forward(x: Tensor, gate: Tensor | None, weight: Tensor | None, *options: Any) -> Tensor:
    if any(t is not None and t.is_meta for t in (x, gate, weight)):
        _check(x, gate, weight, options)
    _, _, rounding, _, _, norm_before_gate = named(options)
    return like(x, gated_reference.result_dtype(x, gate, weight, rounding, norm_before_gate))


def _fake_gated_forward_train(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:
    groups = x.shape[-1] // options[3]
    rstd = x.new_empty((*x.shape[:-1], groups), dtype=reference.compute_dtype(x))
    return _fake_gated_forward(x, gate, weight, *options), rstd


def _fake_gated_backward(
    dy: Tensor, x: Tensor, gate: Tensor | None, rstd: Tensor, weight: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    need_dx, need_dgate, need_dweight = options[-3:]
    return (
        like(x, x.dtype) if need_dx else x.new_empty(0),
        like(x, x.dtype) if need_dgate else x.new_empty(0),
        x.new_empty(x.shape[-1] if need_dweight else 0, dtype=rstd.dtype if weight is None else weight.dtype),
    )


operators = Operators(
    _SCHEMAS,
    {
        "gated_forward": (gated_forward, _fake_gated_forward),
        "gated_forward_train": (gated_forward_train, _fake_gated_forward_train),
        "gated_backward": (gated_backward, _fake_gated_backward),
    },
)
if gpu.missing() is None:
    gpu.register(_library, "gated_operators")
