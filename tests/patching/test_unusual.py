"""Modules that are unusual as Python objects: patch replaces or reports each, and is never left half done."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

import rmsnorm.patching.replacing
from rmsnorm import patch, unpatch
from rmsnorm.patching.patched import is_patched
from tests.wild.handwritten import WIDTH, Base


class Norm(Base):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class NeedsAnArgument(type):
    def __new__(cls, name, bases, body, *, kind):
        return super().__new__(cls, name, bases, body)

    def __init__(cls, name, bases, body, *, kind):
        super().__init__(name, bases, body)


class OfMetaclass(Norm, metaclass=NeedsAnArgument, kind="norm"):
    pass


REGISTRY: dict[str, type] = {}


class Registered(Norm):
    def __init_subclass__(cls, *, key, **more):
        super().__init_subclass__(**more)
        REGISTRY[key] = cls


class RegisteredNorm(Registered, key="norm"):
    pass


class Frozen(Norm):
    def __setattr__(self, name, value):
        if "weight" in self.__dict__.get("_parameters", {}) and name == "__class__":
            raise AttributeError("frozen")
        super().__setattr__(name, value)


class Raises(Norm):
    @property
    def parametrizations(self):
        raise RuntimeError("not now")


class RebuildsItself(Norm):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def __reduce__(self):
        return RebuildsItself, ()


class WithoutHash:
    __hash__ = None

    def __repr__(self):
        raise RuntimeError("no text")

    def __eq__(self, other):
        raise RuntimeError("not comparable")


class Builtin(nn.Module):
    forward = torch.relu


def with_attribute():
    made = Norm()
    made.extra = WithoutHash()
    return made


def cycle():
    first, second = nn.Identity(), nn.Identity()
    first.other, second.other = second, first
    return first


def with_weight(weight):
    made = Norm()
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made


REPLACED = {
    "a metaclass with arguments": OfMetaclass,
    "a registry with arguments": RegisteredNorm,
    "refuses another class": Frozen,
    "rebuilds itself": RebuildsItself,
    "an attribute without hash and text": with_attribute,
}
LEFT = {
    "a property that raises": Raises,
    "a builtin as forward": Builtin,
    "a cycle": cycle,
    "a weight in float8": lambda: with_weight(torch.ones(WIDTH).to(torch.float8_e4m3fn)),
    "a sparse weight": lambda: with_weight(torch.ones(WIDTH).to_sparse()),
    "a quantised weight": lambda: with_weight(torch.quantize_per_tensor(torch.ones(WIDTH), 0.1, 0, torch.qint8)),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("make", [*REPLACED.values(), *LEFT.values()], ids=[*REPLACED, *LEFT])
def test_an_unusual_module_does_not_keep_others_from_being_replaced(make):
    model = nn.Sequential(Norm(), make(), Norm())
    report = patch(model)
    assert [is_patched(m) for m in model] == [True, make in REPLACED.values(), True]
    assert {"0", "2"} <= {entry.name for entry in report.replaced}
    unpatch(model)
    assert not any(map(is_patched, model))


def test_registries_keep_the_class_of_their_author():
    patch(RegisteredNorm())
    assert REGISTRY["norm"] is RegisteredNorm


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])  # noqa: S301
def test_a_class_with_pickling_of_its_own_stays_copyable(copied):
    module = RebuildsItself()
    patch(module)
    again = copied(module)
    assert is_patched(again)
    assert torch.equal(again(torch.ones(2, WIDTH)), module(torch.ones(2, WIDTH)))


def test_an_error_of_ours_undoes_what_was_done(monkeypatch):
    model = nn.Sequential(Norm(), nn.RMSNorm(WIDTH), Norm())
    given = []

    def interrupted(module, cls):
        given.append(module)
        if len(given) == 2:
            raise KeyboardInterrupt
        object.__setattr__(module, "__class__", cls)

    monkeypatch.setattr(rmsnorm.patching.replacing, "_give", interrupted)
    with pytest.raises(KeyboardInterrupt):
        patch(model)
    assert not any(map(is_patched, model))


def test_layers_that_differ_in_a_number_are_examined_once(monkeypatch):
    examined = []
    prove = rmsnorm.patching.survey.prove_module_once
    monkeypatch.setattr(rmsnorm.patching.survey, "prove_module_once", lambda m: examined.append(m) or prove(m))
    model = nn.Sequential(*(Norm() for _ in range(20)))
    for number, norm in enumerate(model):
        norm.layer = number
    assert len(patch(model).replaced) == 20
    assert sum(isinstance(m, Norm) for m in examined) == 1


def test_large_flat_parameters_are_not_run():
    class Table(nn.Module):
        ran = False

        def __init__(self):
            super().__init__()
            self.flat = nn.Parameter(torch.zeros(1_000_000))

        def forward(self, x):
            Table.ran = True
            return x * self.flat

    assert not patch(Table()).replaced
    assert not Table.ran


def test_a_freed_weight_is_a_reason():
    model = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8))
    model[1].weight.untyped_storage().resize_(0)
    (entry,) = patch(model).left
    assert "storage was freed" in entry.reason
    assert rmsnorm.identify(model[1]) is None


@pytest.mark.parametrize("inside", [True, False])
def test_fake_tensors_are_a_reason(inside):
    from torch._subclasses import FakeTensorMode

    mode = FakeTensorMode()
    with mode:
        model = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8))
        report = patch(model) if inside else None
    report = report or patch(model)
    assert ["fake tensor" in entry.reason for entry in report.left] == [True]
