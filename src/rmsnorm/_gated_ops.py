"""The gated and grouped operators `torch.ops.rmsnorm.gated_*`: as _ops.py, with gated_reference.py as the reference.

    gated_forward(x, gate, weight, eps, weight_offset, rounding, group_size, activation, norm_before_gate) -> y
    gated_forward_train(...) -> (y, rstd)
    gated_backward(dy, x, gate, rstd, weight, weight_offset, group_size, activation, norm_before_gate,
                   need_dx, need_dgate, need_dweight) -> (dx, dgate, dweight)

`rounding` and `activation` are indices into `reference.ROUNDINGS` and `gated_reference.ACTIVATIONS`. Without a gate,
groups of the row are all that differs from the plain operators. What is not needed comes back as an empty vector.
"""

from __future__ import annotations

from torch import Tensor

from rmsnorm import checks, gated_reference, reference
from rmsnorm._ops import Operators, check, laid_out_like, like

_SCHEMAS = """
gated_forward(Tensor x, Tensor? gate, Tensor? weight, float eps, float weight_offset, int rounding, int group_size, int activation, bool norm_before_gate) -> Tensor
gated_forward_train(Tensor x, Tensor? gate, Tensor? weight, float eps, float weight_offset, int rounding, int group_size, int activation, bool norm_before_gate) -> (Tensor y, Tensor rstd)
gated_backward(Tensor dy, Tensor x, Tensor? gate, Tensor rstd, Tensor? weight, float weight_offset, int group_size, int activation, bool norm_before_gate, bool need_dx, bool need_dgate, bool need_dweight) -> (Tensor dx, Tensor dgate, Tensor dweight)
"""  # noqa: E501


def _check(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, weight_offset: float, group_size: int
) -> None:
    """What the kernels check: plain PyTorch would broadcast, truncate and go on."""
    check(x, weight, eps, weight_offset)
    checks.check_group_size(group_size, x.shape[-1])
    if gate is not None:
        checks.check_gate(gate, x)


def gated_forward(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    rounding: int,
    group_size: int,
    activation: int,
    norm_before_gate: bool,
) -> Tensor:
    return gated_forward_train(x, gate, weight, eps, weight_offset, rounding, group_size, activation, norm_before_gate)[
        0
    ]


def gated_forward_train(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    rounding: int,
    group_size: int,
    activation: int,
    norm_before_gate: bool,
) -> tuple[Tensor, Tensor]:
    _check(x, gate, weight, eps, weight_offset, group_size)
    y, rstd = gated_reference.forward(
        x,
        gate,
        weight,
        eps,
        weight_offset,
        reference.ROUNDINGS[rounding],
        group_size,
        gated_reference.ACTIVATIONS[activation],
        norm_before_gate,
    )
    return laid_out_like(x, y), rstd.contiguous()


def gated_backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    weight_offset: float,
    group_size: int,
    activation: int,
    norm_before_gate: bool,
    need_dx: bool,
    need_dgate: bool,
    need_dweight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
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


def _fake_gated_forward(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    rounding: int,
    group_size: int,
    activation: int,
    norm_before_gate: bool,
) -> Tensor:
    if any(t is not None and t.is_meta for t in (x, gate, weight)):
        _check(x, gate, weight, eps, weight_offset, group_size)
    name = reference.ROUNDINGS[rounding]
    return like(x, gated_reference.result_dtype(x, gate, weight, name, norm_before_gate))


def _fake_gated_forward_train(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    rounding: int,
    group_size: int,
    activation: int,
    norm_before_gate: bool,
) -> tuple[Tensor, Tensor]:
    y = _fake_gated_forward(x, gate, weight, eps, weight_offset, rounding, group_size, activation, norm_before_gate)
    return y, x.new_empty((*x.shape[:-1], x.shape[-1] // group_size), dtype=reference.compute_dtype(x))


def _fake_gated_backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    weight_offset: float,
    group_size: int,
    activation: int,
    norm_before_gate: bool,
    need_dx: bool,
    need_dgate: bool,
    need_dweight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
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
