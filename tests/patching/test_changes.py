"""What changes after patch and is part of the result: a patched module follows it, by its own forward."""

import copy
import pickle
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rmsnorm import patch, unpatch
from rmsnorm.patching.patched import is_patched
from tests.wild.handwritten import WIDTH, Base


def rows(*lead, seed=0):
    return torch.randn(*(lead or (3,)), WIDTH, generator=torch.Generator().manual_seed(seed)) * 0.01


def normalize(x, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class Scaled(nn.Module):
    """Has everything that may change."""

    floor = 1e-6

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.factor, self.flags, self._shift, self.out = 1.0, {"double": False}, 0, None
        self.register_parameter("bias", None)
        self.number = torch.tensor(0.0)

    def forward(self, x):
        y = normalize(x, self.floor) * (self.weight + self._shift) * self.factor
        y = y if self.bias is None else y + self.bias
        y = self.finish(y)
        y = y * 2 if self.flags["double"] else y
        return y * getattr(self, "later", 1)

    def finish(self, y):
        return y.to(self.out or y.dtype)


CHANGES = {
    "a factor": lambda m: setattr(m, "factor", 0.5),
    "an attribute that begins with an underscore": lambda m: setattr(m, "_shift", 1),
    "an entry of a dictionary": lambda m: m.flags.update(double=True),
    "the result's dtype": lambda m: setattr(m, "out", torch.float64),
    "an attribute that was not there": lambda m: setattr(m, "later", 3),
    "a parameter that was not there": lambda m: setattr(m, "bias", nn.Parameter(torch.ones(WIDTH))),
    "a class attribute, hidden by the instance's": lambda m: setattr(m, "floor", 1.0),
    "past PyTorch's own way of setting": lambda m: vars(m).update(factor=0.25),
    "a method, in the instance": lambda m: setattr(m, "finish", lambda y: y * 7),
    "a tensor in a number's place": lambda m: setattr(m, "factor", torch.tensor(0.5)),
    "many numbers in one's place": lambda m: setattr(m, "factor", torch.linspace(0, 1, WIDTH)),
    "an array of numpy in one's place": lambda m: setattr(m, "factor", np.float64(0.5)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_in_the_instance_is_followed(change):
    own, patched = Scaled(), Scaled()
    assert patch(patched).replaced
    x = rows()
    assert not torch.equal(patched(x), torch.zeros_like(x))
    before = patched(x)
    change(own)
    change(patched)
    assert torch.equal(patched(x), own(x))
    assert not torch.equal(patched(x).float(), before)


def test_a_change_in_a_class_along_the_mro_is_followed():
    class Root(Base):
        rate = 1.0

        def scale(self, y):
            return y * self.rate

        def forward(self, x):
            return self.scale(normalize(x, self.eps) * self.weight)

    class Leaf(Root):
        def forward(self, x):
            return super().forward(x)

    module, x = Leaf(), rows()
    assert patch(module).replaced
    usual = Leaf()(x)
    for cls, name, value in (
        (Root, "rate", 3.0),
        (Root, "scale", lambda self, y: y - 1),
        (Root, "forward", lambda self, x: x * 0),
        (Leaf, "scale", lambda self, y: y + 1),
        (Leaf, "forward", lambda self, x: x * 5),
        (Leaf, "eps", property(lambda self: 9.0)),
    ):
        before = vars(cls).get(name)
        setattr(cls, name, value)
        assert torch.equal(module(x), Leaf.forward(module, x)), name
        assert not torch.allclose(module(x), usual, rtol=1e-3), name
        delattr(cls, name) if before is None else setattr(cls, name, before)
    assert torch.allclose(module(x), usual, rtol=1e-5)


class Seen(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.functions.append(function)
        return function(*args, **(kwargs or {}))


def runs_its_own(module, x):
    with Seen() as seen:
        module(x)
    return torch.rsqrt in seen.functions


class Weighted(Base):
    """Takes its steps in methods."""

    def scale(self, y):
        return y * self.weight

    def forward(self, x):
        return self.scale(normalize(x, self.eps))


class Mixin:
    def scale(self, y):
        return y - 1


LATER = {
    "a step": (lambda cls: cls, {"scale": lambda self, y: y * 7}),
    "forward": (lambda cls: cls, {"forward": lambda self, x: super(type(self), self).forward(x) + 1}),
    "both": (
        lambda cls: cls,
        {"forward": lambda self, x: super(type(self), self).forward(x) + 1, "scale": lambda self, y: y * 7},
    ),
    "a property in the weight's place": (lambda cls: cls, {"weight": property(lambda self: torch.full((WIDTH,), 3.0))}),
    "a number in the weight's place": (lambda cls: cls, {"weight": 3.0}),
    "a property in eps's place": (lambda cls: cls, {"eps": property(lambda self: 9.0)}),
    "a step, by a class before": (lambda cls: (Mixin, cls), {}),
    "a step, two classes up": (lambda cls: type("Between", (cls,), {"scale": lambda self, y: y + 1}), {}),
}


@pytest.mark.parametrize("made", ["the class of a module", "a class to make modules of"])
@pytest.mark.parametrize(("bases", "body"), LATER.values(), ids=LATER.keys())
def test_a_further_subclass_is_followed(bases, body, made):
    def later(cls):
        found = bases(cls)
        return type("Later", found if isinstance(found, tuple) else (found,), dict(body))

    module, own, x = Weighted(), Weighted(), rows()
    assert patch(module).replaced
    nn.init.normal_(own.weight)
    if made == "the class of a module":
        module.__class__ = later(type(module))
    else:
        cls = later(type(module))
        module = cls.__new__(cls)
        vars(module).update(vars(Weighted()))
    with torch.no_grad():
        module._parameters["weight"].copy_(own.weight)
    own.__class__ = later(Weighted)
    torch.testing.assert_close(module(x), own(x))  # the changes are of another order


def test_a_further_subclass_that_says_nothing_of_it_keeps_the_replacement():
    module, x = Weighted(), rows()
    assert patch(module).replaced
    module.__class__ = type("Later", (type(module),), {"describe": lambda self: "more"})
    assert not runs_its_own(module, x)
    nn.utils.parametrize.register_parametrization(module, "weight", nn.Identity())
    assert not runs_its_own(module, x)
    module.__class__ = type("Latest", (type(module),), {"scale": lambda self, y: y})
    assert runs_its_own(module, x)


SETTING = 1.0


def helper(x, eps):
    return normalize(x, eps) * SETTING


class OfGlobals(Base):
    def forward(self, x):
        return helper(x, self.eps) * self.weight


@pytest.mark.parametrize(("name", "value"), [("SETTING", 4.0), ("helper", lambda x, eps: x)])
def test_a_change_in_the_code_around_is_followed(monkeypatch, name, value):
    module, x = OfGlobals(), rows()
    assert patch(module).replaced
    monkeypatch.setitem(globals(), name, value)
    assert torch.equal(module(x), OfGlobals()(x))


def test_a_value_in_a_closure_is_followed():
    rate = 1.0

    class Norm(Base):
        def forward(self, x):
            return normalize(x, self.eps) * self.weight * rate

    module, x = Norm(), rows()
    assert patch(module).replaced
    rate = 2.0
    assert torch.equal(module(x), Norm()(x))


@pytest.mark.parametrize("holder", ["namespace", "dictionary", "object"])
def test_a_configuration_is_followed_or_the_module_left_alone(holder):
    class Config:
        eps = 1e-6

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            made = {"namespace": types.SimpleNamespace(eps=1e-6), "dictionary": {"eps": 1e-6}, "object": Config()}
            self.weight, self.config = nn.Parameter(torch.ones(WIDTH)), made[holder]

        @property
        def eps(self):
            return self.config["eps"] if holder == "dictionary" else self.config.eps

        def forward(self, x):
            return normalize(x, self.eps) * self.weight

    module, x = Norm(), rows()
    report = patch(module)
    assert bool(report.replaced) == (holder == "dictionary")
    assert report.replaced or "may depend on config" in report.left[0].reason
    if holder == "dictionary":
        module.config["eps"] = 1.0
    else:
        module.config.eps = 1.0
    assert torch.equal(module(x), normalize(x, 1.0) * module.weight)


def test_eps_in_a_tensor_is_read_at_each_call():
    class Norm(Base):
        def __init__(self):
            super().__init__(WIDTH)
            self.register_buffer("small", torch.tensor(1e-6))

        def forward(self, x):
            return normalize(x, self.small) * self.weight

    module, x = Norm(), rows()
    assert patch(module).replaced
    module.small.data.fill_(1.0)
    assert torch.equal(module(x), normalize(x, 1.0) * module.weight)


@pytest.mark.parametrize("shape", [(), (1,), (WIDTH, 1), (2, 1, WIDTH)])
def test_a_weight_of_another_shape_is_used_as_the_module_would(shape):
    own, patched = OfGlobals(), OfGlobals()
    assert patch(patched).replaced
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    own.weight, patched.weight = nn.Parameter(weight), nn.Parameter(weight.clone())
    x = rows(2, WIDTH)
    assert torch.equal(own(x), patched(x))


def test_a_child_and_its_hooks_are_watched():
    class Norm(Base):
        def __init__(self):
            super().__init__(WIDTH)
            self.end = nn.Identity()

        def forward(self, x):
            return self.end(normalize(x, self.eps) * self.weight)

    module, x = Norm(), rows()
    assert patch(module).replaced
    own = copy.deepcopy(module)
    unpatch(own)
    seen = []
    handle = module.end.register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(module(x), own(x))
    assert seen == [1]
    handle.remove()
    module.end = nn.Tanh()
    assert torch.equal(module(x), torch.tanh(own(x)))


def test_the_forward_of_a_class_replaced_between_two_patches_is_the_one_that_counts():
    class Norm(Base):
        def forward(self, x):
            return normalize(x, self.eps) * self.weight

    first, x = Norm(), rows()
    patch(first)

    def forward(self, x, residual=None):
        h = x if residual is None else x + residual
        y = normalize(h, self.eps) * self.weight
        return y if residual is None else (y, h)

    Norm.forward = forward
    second = Norm()
    assert patch(second).replaced
    assert type(first) is not type(second)
    for module in (first, second):
        y, h = module(x, x)
        assert torch.equal(h, x + x)
        assert torch.equal(y, normalize(h, 1e-5) * module.weight)


def test_a_pickled_module_is_not_trusted_where_its_class_is_another(monkeypatch):
    module, x = OfGlobals(), rows()
    patch(module)
    text = pickle.dumps(module)
    assert torch.equal(pickle.loads(text)(x), module(x))  # noqa: S301
    monkeypatch.setattr(OfGlobals, "forward", lambda self, x: x * 3)
    assert torch.equal(pickle.loads(text)(x), x * 3)  # noqa: S301


def test_modules_share_a_class_unless_what_they_depend_on_differs():
    model = nn.Sequential(*(Scaled() for _ in range(4)))
    model[1].layer, model[2]._shift, model[3].factor = 7, 0, 2.0
    report = patch(model)
    assert [entry.name for entry in report.replaced] == ["0", "1", "2"]
    assert len({type(m) for m in list(model)[:3]}) == 1
    assert not is_patched(model[3])


def test_autocast_gives_what_the_module_gives_under_it():
    own, patched = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
    patch(patched)
    x = rows().bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert own(x).dtype == patched(x).dtype
        assert torch.equal(own(x), patched(x))
