"""The gated and grouped operators `torch.ops.rmsnorm.gated_*`: as library.py, with gated_reference.py as the reference.

    gated_forward(x, gate, weight, eps, weight_offset, rounding, group_size, activation, gate_first) -> y
    gated_forward_train(...) -> (y, rstd)
    gated_forward_out(..., out) -> ()
    residual_forward(x, residual, weight, eps, weight_offset, rounding, group_size, exact_sum, alpha) -> (y, h, rstd)
    gated_backward(dy, x, gate, rstd, weight, dh, weight_offset, group_size, activation, gate_first,
                   need_dx, need_dgate, need_dweight) -> (dx, dgate, dweight)

Below, *options are all that comes after the tensors. `rounding` and `activation` are indices into
`reference.ROUNDINGS` and `gated_reference.ACTIVATIONS`. Without a gate, groups of the row are all that differs from
the plain operators; group_size 0 is the whole row. What is not needed comes back as None.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rmsnorm import checks, gpu
from rmsnorm.numerics import gated_reference, reference
from rmsnorm.ops.library import Operators, _library, check, laid_out_like, like

_SCHEMAS = """
gated_forward(Tensor x, Tensor? gate, Tensor? weight, float eps, float weight_offset, int rounding, int group_size, int activation, bool gate_first) -> Tensor
gated_forward_train(Tensor x, Tensor? gate, Tensor? weight, float eps, float weight_offset, int rounding, int group_size, int activation, bool gate_first) -> (Tensor y, Tensor rstd)
gated_forward_out(Tensor x, Tensor? gate, Tensor? weight, float eps, float weight_offset, int rounding, int group_size, int activation, bool gate_first, Tensor(a!) out) -> ()
residual_forward(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset, int rounding, int group_size, bool exact_sum, float alpha) -> (Tensor y, Tensor h, Tensor rstd)
gated_backward(Tensor dy, Tensor x, Tensor? gate, Tensor rstd, Tensor? weight, Tensor? dh, float weight_offset, int group_size, int activation, bool gate_first, bool need_dx, bool need_dgate, bool need_dweight) -> (Tensor? dx, Tensor? dgate, Tensor? dweight)
"""  # noqa: E501

# eps, weight_offset, rounding, group_size, activation, gate_first
Options = tuple[float, float, int, int, int, bool]


def named(options: Options) -> tuple[float, float, str, int, str, bool]:
    """The options as the reference and the formula take them: names instead of indices."""
    eps, weight_offset, rounding, group_size, activation, gate_first = options
    names = reference.ROUNDINGS[rounding], gated_reference.ACTIVATIONS[activation]
    return eps, weight_offset, names[0], group_size, names[1], not gate_first


def _check(x: Tensor, gate: Tensor | None, weight: Tensor | None, options: Options) -> None:
    """What the kernels check: plain PyTorch would broadcast, truncate and go on."""
    eps, weight_offset, _, group_size, _, _ = options
    check(x, weight, eps, weight_offset)
    checks.check_group_size(group_size or None, x.shape[-1])
    if gate is not None:
        checks.check_gate(gate, x)


def gated_forward(x: Tensor, gate: Tensor | None, weight: Tensor | None, *options: Any) -> Tensor:
    return gated_forward_train(x, gate, weight, *options)[0]


def gated_forward_train(x: Tensor, gate: Tensor | None, weight: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    _check(x, gate, weight, options)
    y, rstd = gated_reference.forward(x, gate, weight, *named(_with_group_size(x, options)))
    return laid_out_like(x, y), rstd.contiguous()


def _with_group_size(x: Tensor, options: Any) -> Options:
    """The options of a forward, group_size 0 replaced by the whole row that it means."""
    return *options[:3], options[3] or x.shape[-1], *options[4:]


def gated_forward_out(x: Tensor, gate: Tensor | None, weight: Tensor | None, *options: Any) -> None:
    *options, out = options  # type: ignore[assignment]
    y = gated_forward(x, gate, weight, *options)
    checks.check_out(out, x, weight, y.dtype)
    if gate is not None:
        checks.check_out(out, gate, None, y.dtype)
    out.copy_(y)


def residual_forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    rounding: int,
    group_size: int,
    exact_sum: bool,
    alpha: float,
) -> tuple[Tensor, Tensor, Tensor]:
    options = (eps, weight_offset, rounding, group_size, 0, False)
    _check(x, None, weight, options)
    compute = reference.compute_dtype(x)
    branch = x if alpha == 1 else x * alpha
    total = branch.to(compute) + residual.to(compute)
    h = total.to(residual.dtype)
    u = total if exact_sum else h.to(compute)
    size, convention = group_size or x.shape[-1], reference.ROUNDINGS[rounding]
    x_hat, rstd = gated_reference.forward(u, None, None, eps, 0.0, "once", size, "silu", True)
    y = reference.round_x_hat(x_hat, x, weight, convention)
    if weight is not None:
        y = y * reference._gain(weight, weight_offset, compute)
    y = y.to(reference.result_dtype(x, weight, convention))
    return laid_out_like(x, y), laid_out_like(x, h), rstd.contiguous()


def gated_backward(
    dy: Tensor, x: Tensor, gate: Tensor | None, rstd: Tensor, weight: Tensor | None, dh: Tensor | None, *options: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    weight_offset, group_size, activation, gate_first, need_dx, need_dgate, need_dweight = options
    name = gated_reference.ACTIVATIONS[activation]
    dx, dgate, dweight = gated_reference.backward(
        dy, x, gate, rstd, weight, weight_offset, group_size or x.shape[-1], name, not gate_first, dh
    )
    return (
        laid_out_like(x, dx) if need_dx else None,
        laid_out_like(x, dgate) if need_dgate and dgate is not None else None,
        dweight if need_dweight else None,
    )


# ---------------------------------------------------------------- shapes, for tracing


def _fake_gated_forward(x: Tensor, gate: Tensor | None, weight: Tensor | None, *options: Any) -> Tensor:
    if any(t is not None and t.is_meta for t in (x, gate, weight)):
        _check(x, gate, weight, options)
    rounding = reference.ROUNDINGS[options[2]]
    return like(x, gated_reference.result_dtype(x, gate, weight, rounding, not options[5]))


def _fake_gated_forward_train(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:
    groups = x.shape[-1] // (options[3] or x.shape[-1])
    rstd = x.new_empty((*x.shape[:-1], groups), dtype=reference.compute_dtype(x))
    return _fake_gated_forward(x, gate, weight, *options), rstd


def _fake_gated_forward_out(x: Tensor, gate: Tensor | None, weight: Tensor | None, *options: Any) -> None:
    _fake_gated_forward(x, gate, weight, *options[:-1])


def _fake_residual_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    eps, weight_offset, rounding, group_size, _, _ = options
    y, rstd = _fake_gated_forward_train(x, None, weight, eps, weight_offset, rounding, group_size, 0, False)
    return y, like(x, residual.dtype), rstd


def _fake_gated_backward(
    dy: Tensor, x: Tensor, gate: Tensor | None, rstd: Tensor, weight: Tensor | None, dh: Tensor | None, *options: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    need_dx, need_dgate, need_dweight = options[-3:]
    return (
        like(x, x.dtype) if need_dx else None,
        like(x, x.dtype if gate is None else gate.dtype) if need_dgate else None,
        x.new_empty(x.shape[-1], dtype=rstd.dtype if weight is None else weight.dtype) if need_dweight else None,
    )


operators = Operators(
    _SCHEMAS,
    {
        "gated_forward": (gated_forward, _fake_gated_forward),
        "gated_forward_train": (gated_forward_train, _fake_gated_forward_train),
        "gated_forward_out": (gated_forward_out, _fake_gated_forward_out),
        "residual_forward": (residual_forward, _fake_residual_forward),
        "gated_backward": (gated_backward, _fake_gated_backward),
    },
)
if gpu.missing() is None:
    gpu.register(_library, "gated_operators")
