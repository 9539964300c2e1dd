"""Every norm class of transformers: identified, patched, and its results and gradients compared in three dtypes."""

import copy
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch

from rmsnorm import identify, patch, unpatch
from tests.support import bits
from tests.wild import classes, exact

pytestmark = pytest.mark.wild("transformers")

# Counted once by reading the sources; another version has other numbers.
COUNTED_IN = "5.24.0"
PLAIN, GATED = 206, 15
# What exact arithmetic may differ by from a float32 result that is rounded three times (docs/numerics.md), a gate's
# product and activation included; 16-bit results are rounded twice besides, before the weight and after.
ROUNDING = {torch.float32: 8 * 2.0**-24, torch.bfloat16: 2.1 * 2.0**-8, torch.float16: 2.1 * 2.0**-11}


@cache
def instances():
    generator = torch.Generator().manual_seed(0)
    built = {cls: classes.build(cls, generator) for cls in classes.find()}
    return {cls: module for cls, module in built.items() if module is not None}


@cache
def conventions():
    return {cls: convention for cls, module in instances().items() if (convention := identify(module)) is not None}


def test_every_rms_norm_is_recognised_and_nothing_else_is():
    import transformers

    gated = [cls for cls, convention in conventions().items() if convention.activation is not None]
    if transformers.__version__ == COUNTED_IN:
        assert (len(conventions()) - len(gated), len(gated)) == (PLAIN, GATED)
    others = {cls.__name__ for cls in instances()} - {cls.__name__ for cls in conventions()}
    # HYV4's return the reciprocal alone; MuseSpark's takes its statistics after the weight.
    odd = {"HYV4UnweightedRMSNorm", "HYV4VLUnweightedRMSNorm", "MuseSparkTextInputScaledRMSNorm"}
    assert {name for name in others if "RMSNorm" in name} <= odd
    # Llama 4 calls its RMSNorm without a weight so.
    accepted = {cls.__name__ for cls in conventions()} - {"Llama4TextL2Norm"}
    assert not [name for name in accepted if any(kind in name for kind in ("BatchNorm", "GroupNorm", "L2Norm"))]


def test_an_identified_module_is_left_as_it_was():
    for cls, module in instances().items():
        before = {name: (id(t), t.clone()) for name, t in module.state_dict(keep_vars=True).items()}
        attributes = dict(vars(module))
        state = torch.get_rng_state()
        identify(module)
        assert torch.equal(torch.get_rng_state(), state), cls
        assert vars(module) == attributes, cls
        after = module.state_dict(keep_vars=True)
        assert all(id(after[name]) == at and torch.equal(after[name], t) for name, (at, t) in before.items()), cls


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_patched_results_and_gradients_are_as_near_to_float64_as_their_own(dtype):
    generator = torch.Generator().manual_seed(1)
    bound = ROUNDING[dtype]
    for cls, convention in conventions().items():
        theirs = copy.deepcopy(instances()[cls]).to(dtype)
        ours = copy.deepcopy(theirs)
        assert len(patch(ours).replaced) == 1, cls
        weight = None if convention.weight is None else theirs.get_parameter(convention.weight)
        x = torch.randn(2, 5, classes.WIDTH, generator=generator)
        x[0] *= 100
        inputs = [x] if convention.activation is None else [x, torch.randn(x.shape, generator=generator) * 2]
        inputs = [t.to(dtype) for t in inputs]
        dy = torch.randn(x.shape, generator=generator).to(dtype)

        def run(module, dtype=dtype, inputs=inputs, dy=dy, name=convention.weight):
            module.zero_grad()
            leaves = [t.clone().requires_grad_() for t in inputs]
            y = module(*leaves)
            y.backward(dy.to(y.dtype))
            own = [] if name is None else [module.get_parameter(name).grad.clone()]
            return [y.detach(), *(t.grad for t in leaves), *own]

        leaves = [t.double().requires_grad_() for t in (*inputs, *([] if weight is None else [weight.detach()]))]
        gate = leaves[1] if convention.activation is not None else None
        y = exact.forward(convention, leaves[0], None if weight is None else leaves[-1], gate)
        wanted = [y.detach(), *torch.autograd.grad(y, leaves, dy.double())]
        for got, own, correct in zip(run(ours), run(theirs), wanted, strict=True):
            assert got.dtype == own.dtype, cls
            assert exact.error(got, correct) <= max(exact.error(own, correct), bound), cls
        assert unpatch(ours) == 1
        assert all(torch.equal(a, b) for a, b in zip(run(ours), run(theirs), strict=True)), cls


def test_the_formulas_of_the_page_are_executable_and_give_the_bits_of_the_convention():
    """rstd and sigmoid are correctly rounded here, as in the contract: float64 is exact enough except beside a tie."""
    generator = torch.Generator().manual_seed(2)
    dtypes = tuple(ROUNDING)
    seen = set()
    for convention in conventions().values():
        lines = "\n".join(classes.formula(convention))
        if (lines, convention.group_size, convention.eps) in seen:
            continue
        seen.add((lines, convention.group_size, convention.eps))
        for x_dtype, w_dtype in product(dtypes, dtypes):
            x, z = (torch.randn(40, classes.WIDTH, generator=generator).to(x_dtype) for _ in "xz")
            w = None if convention.weight is None else torch.randn(classes.WIDTH, generator=generator).to(w_dtype)

            def rstd(u, group=convention.group_size or classes.WIDTH, eps=convention.eps):
                square = u.double().square().unflatten(-1, (-1, group)).mean(-1) + eps
                return square.rsqrt().float().repeat_interleave(group, -1)

            def sigmoid(z):
                return z.double().sigmoid().float()

            names = {"x": x, "w": w, "z": z, "rstd": rstd, "sigmoid": sigmoid, "float32": torch.float32}
            names |= {"silu": lambda z: z * sigmoid(z), "to": lambda dtype, u: u.to(dtype)}
            exec(lines, names)  # noqa: S102 - the page's formulas
            bits.same(convention.apply(x, w, None if convention.activation is None else z), names["y"])
    assert len(seen) >= 10


def test_the_table_in_the_docs_is_what_the_command_writes():
    import transformers

    if transformers.__version__ != COUNTED_IN:
        pytest.skip(f"the table is of transformers {COUNTED_IN}")
    table = (Path(__file__).parents[2] / "docs" / "families.md").read_text()
    assert table == classes.document(classes.find())
