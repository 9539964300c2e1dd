"""How a norm is called is found from its signature, and by trying."""

import pytest
import torch
from torch import nn

import rmsnorm
from rmsnorm.conformance import chosen, modules
from rmsnorm.conformance.calling import understand
from rmsnorm.conformance.implementation import CannotCheck
from rmsnorm.conformance.outcome import PASS
from tests.conformance.faulty import formula
from tests.conformance.suite import results


def _with_out(out, x, weight, eps):
    out.copy_(formula.right(x, weight, eps))


class _Epsilon(nn.Module):
    def __init__(self, features, epsilon=1e-6, add_unit_offset=False):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(1, features))
        self.epsilon, self.offset = epsilon, float(add_unit_offset)

    def forward(self, x):
        return formula.right(x, self.gamma + self.offset, self.epsilon)


class _OffsetSecond(nn.Module):
    """No eps, and what stands in its place is something else."""

    def __init__(self, dim, unit_offset=False):
        super().__init__()
        self.g = nn.Parameter(torch.ones(dim))
        self.unit_offset = unit_offset

    def forward(self, x):
        return formula.right(x, self.g + float(self.unit_offset), 1e-6)


@pytest.mark.parametrize(
    ("target", "calls"),
    [
        (lambda x, weight, eps: formula.right(x, weight, eps), "it(x, weight=weight, eps=eps)"),
        (lambda h, gain, variance_epsilon: formula.right(h, gain, variance_epsilon), "variance_epsilon=eps"),
        (lambda a, b, c=1e-6: formula.right(a, b, c), "it(x, weight, eps)"),
        (lambda *given: formula.right(*given), "it(x, weight, eps)"),
        (
            lambda x, shape, scale, epsilon=1e-6: formula.right(x, scale, epsilon),
            "it(x, shape=shape, scale=weight, epsilon=eps)",
        ),
        (_with_out, "it(out, x, weight, eps)"),
        (lambda x, eps=1e-6: formula.right(x, torch.ones(x.shape[-1]), eps), "it(x, eps=eps)"),
        (lambda x, weight, eps: (formula.right(x, weight, eps), None), "it(x, weight=weight, eps=eps)"),
        (_OffsetSecond, "it(width, unit_offset=offset)(x)"),
        (torch.rms_norm, "it(x, shape, weight, eps)"),
        (_Epsilon, "it(width, epsilon=eps, add_unit_offset=offset)(x)"),
        (lambda width, eps=1e-6: nn.RMSNorm(width, eps=eps), "it(width, eps=eps)(x)"),
        (nn.RMSNorm(32), "it(x)"),
        (rmsnorm.RMSNorm(32), "it(x, residual=residual)"),
    ],
)
def test_how_it_is_called_is_found(target, calls):
    implementation = understand(target, "it")
    assert calls in implementation.calls
    assert results(implementation, chosen(["convention"]))["convention"].verdict == PASS


def test_what_cannot_be_called_says_what_was_tried():
    def norm(x, weight, eps, secret):
        raise AssertionError

    with pytest.raises(CannotCheck) as raised:
        understand(norm, "mine:norm")
    said = str(raised.value)
    assert "norm(x, weight=weight, eps=eps): TypeError" in said
    assert "secret" in said
    with pytest.raises(CannotCheck, match="neither a function, a class nor a module"):
        understand(3, "three")


def test_weight_names_go_before_positions():
    module = nn.Module()
    module.register_buffer("other", torch.zeros(4))
    module.weight = nn.Parameter(torch.zeros(4))
    assert modules.weight_name(module, 4) == "weight"
