"""patch and unpatch: what of a module stays as it was."""

import copy
import io
import pickle
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import rmsnorm
from rmsnorm import identify, patch, unpatch
from tests.wild.handwritten import Base, NormalizeWithUnitOffset, SigmoidGateInside


class Block(nn.Module):
    def __init__(self, norm, dim=64):
        super().__init__()
        self.norm = norm
        self.linear = nn.Linear(dim, dim)

    def forward(self, x):
        return x + self.linear(self.norm(x))


class Llama(Base):
    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def model(layers=2, dim=64):
    made = nn.Sequential(*(Block(Llama(dim), dim) for _ in range(layers)))
    for block in made:
        nn.init.normal_(block.norm.weight)
    return made


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_everything_about_a_module_but_its_forward_stays():
    before = model()
    norm = before[0].norm
    state, parameters, attributes = before.state_dict(), list(before.parameters()), dict(vars(norm))
    patch(before)
    assert before[0].norm is norm
    assert isinstance(norm, Llama)
    assert (type(norm).__name__, type(norm).__module__) == ("Llama", Llama.__module__)
    assert norm.eps == 1e-5
    assert vars(norm) == attributes
    assert all(a is b for a, b in zip(before.parameters(), parameters, strict=True))
    assert list(before.state_dict()) == list(state)
    assert "rmsnorm: width 64, eps 1e-05, weight, before_scale" in repr(norm)


def test_unpatch_gives_back_the_class_and_the_bits():
    patched = model()
    x = rows(5, 64)
    own = patched(x)
    patch(patched)
    assert unpatch(patched) == 2
    assert type(patched[0].norm) is Llama
    assert torch.equal(patched(x), own)
    assert unpatch(patched) == 0


def test_a_second_patch_changes_nothing():
    patched = model()
    assert len(patch(patched).replaced) == 2
    cls = type(patched[0].norm)
    again = patch(patched)
    assert type(patched[0].norm) is cls
    assert not again.replaced
    assert [entry.reason for entry in again.left] == ["uses this library already"] * 2
    assert unpatch(patched) == 2


def test_identify_sees_the_same_in_a_patched_module():
    norm = Llama(64)
    convention = identify(norm)
    patch(norm)
    assert identify(norm) == convention


def test_the_patched_forward_is_this_librarys():
    norm = model()[0].norm
    patch(norm)
    x = rows(5, 64)
    assert torch.equal(norm(x), rmsnorm.rms_norm(x, norm.weight, 1e-5, rounding="before_scale"))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])  # noqa: S301
def test_copies_are_patched_and_independent(copied):
    patched = model()
    patch(patched)
    other = copied(patched)
    x = rows(5, 64)
    assert torch.equal(other(x), patched(x))
    assert type(other[0].norm) is type(patched[0].norm)
    with torch.no_grad():
        other[0].norm.weight.zero_()
    assert patched[0].norm.weight.abs().sum() > 0
    assert unpatch(other) == 2
    assert identify(other[0].norm) is not None


def test_whole_models_can_be_saved_and_loaded():
    patched = model()
    patch(patched)
    file = io.BytesIO()
    torch.save(patched, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(rows(5, 64)), patched(rows(5, 64)))


def test_a_state_dict_goes_both_ways():
    patched, plain = model(), model()
    patch(patched)
    patched.load_state_dict(plain.state_dict())
    plain.load_state_dict(patched.state_dict())
    torch.testing.assert_close(patched(rows(5, 64)), plain(rows(5, 64)))


def test_hooks_fire_once_a_call_and_never_while_looking():
    patched = model()
    calls = []
    patched[0].norm.register_forward_hook(lambda *_: calls.append("forward"))
    patched[0].norm.register_full_backward_hook(lambda *_: calls.append("backward"))
    patch(patched)
    assert calls == []
    patched(rows(5, 64).requires_grad_()).sum().backward()
    assert calls == ["forward", "backward"]


def test_tied_weights_stay_tied():
    patched = model()
    patched[1].norm.weight = patched[0].norm.weight
    patch(patched)
    assert patched[1].norm.weight is patched[0].norm.weight


def test_a_module_under_two_names_is_replaced_once():
    norm = Llama(64)
    shared = nn.ModuleList([norm, norm])
    assert len(patch(shared).replaced) == 1
    assert unpatch(shared) == 1


def test_dtype_and_device_can_change_afterwards():
    patched = model()
    patch(patched)
    x = rows(5, 64)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        patched.to(dtype)
        norm = patched[0].norm
        y = norm(x.to(dtype))
        assert torch.equal(y, rmsnorm.rms_norm(x.to(dtype), norm.weight, 1e-5, rounding="before_scale"))
    # Not among what was proved, so the module's own forward runs.
    norm = patched.double()[0].norm
    assert torch.equal(norm(x.double()), Llama.forward(norm, x.double()))


def test_what_the_proof_does_not_cover_runs_the_modules_own_forward():
    norm = Llama(64)
    patch(norm)
    with pytest.raises(RuntimeError, match="size of tensor"):
        norm(rows(5, 32))
    gated = SigmoidGateInside()
    patch(gated)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        gated(rows(5, 48))
    x, z = rows(5, 48), rows(5, 48, seed=1)
    assert torch.equal(gated(z=z, x=x), gated(x, z))


def test_gradients_reach_x_and_the_same_parameter():
    own, patched = model(1), None
    patched = copy.deepcopy(own)
    patch(patched)
    for m in (own, patched):
        m(rows(5, 64)).square().sum().backward()
    for p, q in zip(own.parameters(), patched.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_gradient_checkpointing():
    patched = model(1)
    patch(patched)
    x = rows(5, 64).requires_grad_()
    checkpoint(patched, x, use_reentrant=False).sum().backward()
    saved, x.grad = x.grad, None
    patched(x).sum().backward()
    assert torch.equal(saved, x.grad)


def test_compiled_without_a_break():
    patched = model(1)
    patch(patched)
    torch._dynamo.reset()
    compiled = torch.compile(patched, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(rows(5, 64)), patched(rows(5, 64)))


def test_on_the_meta_device_the_convention_is_proved_on_weights_of_its_own():
    with torch.device("meta"):
        patched = model()
    assert len(patch(patched).replaced) == 2
    assert patched[0].norm.weight.is_meta
    patched.to_empty(device="cpu")
    plain = model()
    patched.load_state_dict(plain.state_dict())
    torch.testing.assert_close(patched(rows(5, 64)), plain(rows(5, 64)))


def test_a_forward_replaced_on_the_instance_is_left_alone_and_said_so():
    norm = Llama(64)
    norm.forward = lambda x: x
    (entry,) = patch(nn.Sequential(nn.RMSNorm(8), norm)).left or [None]
    assert entry is None or "replaced on the instance" in entry.reason


def test_unpatch_refuses_what_was_given_another_class_since():
    patched = model()
    patch(patched)
    nn.utils.parametrize.register_parametrization(patched[0].norm, "weight", nn.Identity())
    with pytest.raises(ValueError, match=r"0\.norm was given the class"):
        unpatch(patched)
    nn.utils.parametrize.remove_parametrizations(patched[0].norm, "weight")
    assert unpatch(patched) == 2


def test_nothing_random_moves():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    patch(nn.Sequential(nn.Dropout(), Llama(64), nn.LayerNorm(64)))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_report_is_a_table_of_what_was_replaced_and_what_was_not_and_why():
    layers = nn.Sequential(*model(3), nn.LayerNorm(64), NormalizeWithUnitOffset())
    report = patch(layers)
    text = str(report)
    assert text.startswith("4 norms replaced, 1 left alone, ")
    assert "*.norm (3)" in text
    assert "width 64, eps 1e-05, weight, before_scale" in text
    assert "bfloat16: equal" in text
    assert "gamma + 1" in text
    assert "it subtracts the mean: a LayerNorm" in text


def test_our_own_norms_are_known_and_left_alone():
    (entry,) = patch(rmsnorm.RMSNorm(64, rounding="before_scale")).left
    assert entry.reason == "uses this library already"
    assert entry.convention.rounding == "before_scale"


def test_sixty_norms_take_less_than_two_seconds():
    patched = model(60, dim=1024)
    # Of this process: what else the machine does is no part of it.
    start = time.process_time()
    report = patch(patched)
    seconds = time.process_time() - start
    assert len(report.replaced) == 60
    assert seconds < 2
