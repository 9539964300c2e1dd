"""What the public functions must return: by the reference, to the bit; by float64 arithmetic, within derived bounds.

u is a dtype's unit roundoff: one operation, or one rounding to that dtype, has a relative error of at most u.
"""

import math

import torch

from rmsnorm.numerics import fixed_sum
from tests.support import reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
U = {dtype: torch.finfo(dtype).eps / 2 for dtype in DTYPES}
HALF_A_SUBNORMAL = {dtype: torch.finfo(dtype).smallest_normal * U[dtype] for dtype in DTYPES}
# Errors of errors: products of the bounds below, relative to which they are smaller than 1e-4.
SECOND_ORDER = 1.001


def tensor(*shape, dtype=torch.float32, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def rows_of(x, dims):
    """The trailing `dims` dimensions as one, which is how the contract reads a weight of several dimensions."""
    return x if dims == 1 else x.flatten(-dims)


def normalized(x, weight=None, eps=1e-6, *, weight_offset=0.0, rounding="once", dims=1):
    """`rms_norm` by the reference."""
    weight = None if weight is None else weight.reshape(-1)
    return reference.forward(rows_of(x, dims), weight, eps, weight_offset, rounding)[0].reshape(x.shape)


def gradients(dy, x, weight=None, eps=1e-6, *, weight_offset=0.0, dh=None, dims=1):
    """dx and dweight of `rms_norm` by the reference; with dh, the gradient of h, those of `add_rms_norm`."""
    flat = None if weight is None else weight.reshape(-1)
    rows = rows_of(x, dims)
    rstd = reference.forward(rows, flat, eps, weight_offset, "once")[1]
    dh = None if dh is None else rows_of(dh, dims)
    dx, dweight = reference.backward(rows_of(dy, dims), rows, rstd, flat, weight_offset, dh)
    return dx.reshape(x.shape), None if weight is None else dweight.reshape(weight.shape)


def formula(x, weight=None, eps=1e-6, weight_offset=0.0):
    """The definition in the docstring, over the last dimension; in float64 it is the judge."""
    y = x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * (weight + weight_offset)


def exact(x, weight=None, eps=1e-6, weight_offset=0.0):
    return formula(x.double(), None if weight is None else weight.double(), eps, weight_offset)


def y_bound(y, x, weight=None, eps=1e-6, weight_offset=0.0, rounding="once"):
    """How far each element of y may lie from exact arithmetic.

    rstd, x_hat, the product, and the gain where an offset is added or float64 narrowed are rounded once each; then
    comes the rounding to y's dtype. `rounding` may round x_hat once more.
    """
    compute = fixed_sum.compute_dtype(x)
    roundings = U[compute] * (2 + (weight is not None) * (1 + (weight_offset != 0)))
    if rounding == "before_scale":
        roundings += U[x.dtype]
    elif rounding == "weight_dtype" and weight is not None:
        roundings += U[weight.dtype]
    value = exact(x, weight, eps, weight_offset)
    narrowed = 0.0
    if weight is not None and weight.dtype == torch.float64 != compute:
        narrowed = U[compute] * (exact(x, None, eps) * weight.double()).abs()
    # float64's judge is float64 too; its sum of squares is off by at most d roundings, half of which reach the root.
    judge = (x.shape[-1] / 2 + 6) * U[torch.float64]
    return value.abs() * ((roundings + U[y.dtype]) * SECOND_ORDER + judge) + narrowed + HALF_A_SUBNORMAL[y.dtype]


def gradient_bounds(dy, x, weight=None, eps=1e-6, weight_offset=0.0, dh=None):
    """How far dx and dweight of the contract (docs/numerics.md) may lie from exact arithmetic, element by element.

    With u the unit roundoff of the arithmetic: the product `dy * gain` is off by 2u, x_hat by 2u, and so
    k = mean(product * x_hat) by 5u times the mean K of the magnitudes (2u and 1u for rstd inside, 1u at the end, 1 to
    spare). Their product x_hat * k is off by (2 + 5 + 1)u, the difference and the product with rstd by 3u of both.
    The floors of the fixed-point sum are off by less than d quanta of 2^(E + L - 51), which is
    8 * d * 2^-51 * max|product| * max|x_hat| for the mean, and 2^-27 times that for float64's two quanta.
    """
    compute = fixed_sum.compute_dtype(x)
    u = U[compute]
    wide, g = x.double(), dy.double()
    d = x.shape[-1]
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    x_hat = wide * rstd
    product = g if weight is None else g * (weight.double() + weight_offset)
    mean = (product * x_hat).abs().mean(-1, keepdim=True)
    floors = 8 * d * 2.0**-51 * product.abs().amax(-1, keepdim=True) * x_hat.abs().amax(-1, keepdim=True)
    judge = 0.0
    if compute == torch.float64:
        floors, judge = floors * 2.0**-27, (d + 10) * u  # the judge's own sums
    dx = rstd * ((5 * u + judge) * product.abs() + x_hat.abs() * ((11 * u + 2 * judge) * mean + floors))
    value = rstd * (product - x_hat * (product * x_hat).mean(-1, keepdim=True))
    if dh is not None:
        value = value + dh.double()
        dx = dx + u * value.abs()
    dx = SECOND_ORDER * dx + U[x.dtype] * (value.abs() + dx) + HALF_A_SUBNORMAL[x.dtype]
    if weight is None:
        return dx, None

    # Each term is off by 3u, and a float32 sum of n terms by n - 1 roundings of the sum of their magnitudes. Rows are
    # added within leaves, then the leaves in pairs.
    rows = x[..., 0].numel()
    leaves = fixed_sum.leaves(rows)
    terms = 3 + math.ceil(rows / leaves) + math.log2(leaves)
    magnitude = (g * x_hat).reshape(-1, d).abs().sum(0)
    dweight = magnitude * (SECOND_ORDER * (terms * u + (rows if judge else 0) * u + judge) + U[weight.dtype])
    return dx, dweight + HALF_A_SUBNORMAL[weight.dtype]


def within(actual, value, bound):
    """Whether |actual - value| <= bound in every element; says where not."""
    assert actual.shape == value.shape, (actual.shape, value.shape)
    excess = (actual.double() - value).abs() / bound
    assert bool((excess <= 1).all()), f"{excess.nan_to_num(torch.inf).max().item():.3g} times the bound"
    return True


def leaves(*tensors):
    """Copies that gradients end in."""
    return [t.detach().clone().requires_grad_() for t in tensors]


def higher_order_bound(value, d):
    """Float32 derivatives through formula.py, where sums over d elements are taken in any order.

    A sum of d float32 terms is off by at most d roundings of the sum of their magnitudes; by Cauchy-Schwarz that is at
    most sqrt(d) times what it counts in a row whose terms are of one order, as these are. A second derivative is the
    sum of some ten products of up to six such factors each, three of them sums.
    """
    return 10 * (3 * d + 6) * U[torch.float32] * d**0.5 * max(1.0, value.abs().max().item()) * torch.ones_like(value)


def near(actual, expected):
    """Two ways through float64: each is within the bound for float32, scaled by the ratio of their roundoffs."""
    assert within(
        actual, expected, 2 * 2.0**-29 * higher_order_bound(expected, expected.shape[-1] if expected.dim() else 1)
    )
