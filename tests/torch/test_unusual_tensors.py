"""Tensors that are not plain and are answered all the same: subclasses, jagged ones, those of the meta device."""

import pytest
import torch

from rmsnorm import RMSNorm, add_rms_norm, rms_norm
from tests.support.expected import tensor
from tests.support.refusals import check_refused, refused, takers


class Labelled(torch.Tensor):
    """A subclass that adds nothing."""


def test_subclasses_stay_themselves():
    x, weight = tensor(4, 8, dtype=torch.float64), tensor(8, dtype=torch.float64, seed=1)
    y = rms_norm(x.as_subclass(Labelled), weight)
    assert type(y) is Labelled
    # By the formula: two float64 ways to the same number, each within (d + 10) roundings.
    assert ((y - rms_norm(x, weight)).abs() <= 18 * 2.0**-52 * y.abs()).all()
    y, h = add_rms_norm(x, x.as_subclass(Labelled), weight)
    assert type(y) is type(h) is Labelled
    with refused(ValueError, "weight must have shape (8,)"):
        rms_norm(x.as_subclass(Labelled), weight[:4])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_jagged_tensors_are_normalised_row_by_row():
    parts = [tensor(2, 8, dtype=torch.float64), tensor(3, 8, dtype=torch.float64, seed=1)]
    weight = tensor(8, dtype=torch.float64, seed=2)
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    for y, part in zip(rms_norm(nested, weight).unbind(), parts, strict=True):
        expected = rms_norm(part, weight)
        assert ((y - expected).abs() <= 18 * 2.0**-52 * expected.abs()).all()


def test_meta_tensors_have_shapes_and_no_data():
    x, weight = torch.ones(4, 8, device="meta"), torch.ones(8, device="meta", dtype=torch.bfloat16)
    y = rms_norm(x, weight, rounding="weight_dtype")
    assert (y.device.type, y.shape, y.dtype) == ("meta", (4, 8), torch.bfloat16)
    y, h = add_rms_norm(x, x, weight)
    assert y.is_meta
    assert h.is_meta
    x.requires_grad_()
    rms_norm(x, weight).sum().backward()
    assert x.grad.shape == x.shape
    norm = RMSNorm(8, memory_efficient=True, device="meta")
    norm(torch.ones(4, 8, device="meta")).sum().backward()
    assert norm.weight.grad.is_meta
    # As large as no memory is.
    assert rms_norm(torch.ones(1, 1, device="meta").expand(2**30, 2**30)).shape == (2**30, 2**30)


def test_what_does_not_fit_into_memory_is_an_error_and_not_a_crash():
    with pytest.raises(RuntimeError, match=r"allocate memory: (1073741824 MiB|you tried)"):
        rms_norm(torch.ones(1, 1).expand(2**45, 8))


def test_meta_tensors_are_checked_like_others():
    x = torch.ones(4, 8, device="meta")
    for given, weight in ((x[0, 0], None), (x, x[0, :4]), (x, x[:1]), (x[:, :0], None), (x, x[0, 0])):
        check_refused(given, weight, ValueError, "must", "got")
    check_refused(x.int(), None, TypeError, "x must be one of float32", "got int32")
    check_refused(x, x[0].bool(), TypeError, "weight must be one of float32", "got bool")
    for call in [*takers(eps=x[0, 0])][:-1]:
        with refused(TypeError, "eps must be a number", "meta"):
            call()


def test_vmapped_bad_shapes_are_refused():
    with refused(ValueError, "weight must have shape (8,)", "got (7,)"):
        torch.func.vmap(rms_norm, in_dims=(0, None))(torch.ones(5, 4, 8), torch.ones(7))
