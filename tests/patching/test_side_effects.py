"""A module that does more than return its result is left alone; examining it leaves no trace."""

import builtins
import contextvars
import itertools
import logging
import os
import pathlib
import random
import sys
from collections import Counter, deque

import numpy as np
import pytest
import torch
from torch import nn

from rmsnorm import identify, patch
from rmsnorm.patching.identifying import examine
from rmsnorm.patching.specimen import NotRMSNorm

WIDTH = 32
SEEN = []
CALLS = 0
NUMPY = np.random.default_rng(0)


class Plain(nn.Module):
    def __init__(self, note=lambda module, x, y: None, **attributes):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.note = note
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        self.note(self, x, y)
        return y


class Slots:
    __slots__ = ("value",)

    def __init__(self):
        self.value = 0


class Statistics:
    total = 0

    def __init__(self):
        self.sizes = {"rows": []}

    def add(self, x):
        self.sizes["rows"].append(x.dim())


def count_globally(module, x, y):
    global CALLS
    CALLS += 1


def closure():
    calls = 0

    def note(module, x, y):
        nonlocal calls
        calls += 1

    return note, lambda: calls


def remember_a_default(module, x, y, calls=[]):  # noqa: B006 - what is tried
    calls.append(1)


def only_in_training(module, x, y):
    if module.training:
        module.losses.append(y.pow(4).mean())


def write_to_the_weight(module, x, y):
    module.weight.data.clamp_(min=0.0)


def write_to_an_attribute(module, x, y):
    module.largest.data.copy_(x.detach().float().abs().max())


def record_the_gradient(module, x, y):
    if y.requires_grad:
        y.register_hook(lambda dy: module.log.append(float(dy.float().norm())))


def set_on_class(module, x, y):
    Statistics.total += 1


def fill_an_array(module, x, y):
    module.array[:] += 1


def set_key(module, x, y):
    module.log[x.dim()] = 1


class Child(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.log = 0, []


def call_a_child(module, x, y):
    module.child.calls += 1


def log_in_a_child(module, x, y):
    module.child.log.append(1)


WRITERS = {
    "list": (lambda m, x, y: m.log.append(1), {"log": []}),
    "list within a dict of an object": (lambda m, x, y: m.statistics.add(x), {"statistics": Statistics()}),
    "dict": (set_key, {"log": {}}),
    "counter": (lambda m, x, y: m.log.update([x.dim()]), {"log": Counter()}),
    "deque": (lambda m, x, y: m.log.append(1), {"log": deque(maxlen=3)}),
    "set": (lambda m, x, y: m.log.add(x.shape), {"log": set()}),
    "slots": (lambda m, x, y: setattr(m.log, "value", m.log.value + 1), {"log": Slots()}),
    "list of another module": (lambda m, x, y: m.others[0].log.append(1), {"others": (Plain(log=[]),)}),
    "global list": (lambda m, x, y: SEEN.append(1), {}),
    "global number": (count_globally, {}),
    "class": (set_on_class, {}),
    "closure": (closure()[0], {}),
    "default": (remember_a_default, {}),
    "loss in training": (only_in_training, {"losses": []}),
    "weight, through data": (write_to_the_weight, {}),
    "tensor attribute, through data": (write_to_an_attribute, {"largest": torch.zeros(())}),
    "input, through data": (lambda m, x, y: x.data.clamp_(-0.01, 0.01), {}),
    "array": (fill_an_array, {"array": np.zeros(1)}),
    "list, in the backward pass": (record_the_gradient, {"log": []}),
    "child": (call_a_child, {"child": Child()}),
    "list of a child": (log_in_a_child, {"child": Child()}),
}
DRAWERS = {
    "torch": lambda m, x, y: torch.rand(1),
    "python": lambda m, x, y: random.random(),
    "numpy": lambda m, x, y: np.random.rand(),
    "generator of torch": (lambda m, x, y: torch.rand(1, generator=m.generator)),
    "generator of numpy": lambda m, x, y: NUMPY.random(),
}


def reason(module):
    with pytest.raises(NotRMSNorm) as refused:
        examine(module)
    return str(refused.value)


def all_there_is(value):
    """Everything in it, as text: containers of the cases here print their contents."""
    inside = getattr(value, "__dict__", {name: getattr(value, name) for name in getattr(value, "__slots__", ())})
    return repr(value) if isinstance(value, (list, dict, set, deque, np.ndarray, torch.Tensor)) else repr(inside)


@pytest.mark.parametrize("name", WRITERS)
def test_a_module_that_writes_somewhere_is_left_alone_and_nothing_is_written(name):
    note, attributes = WRITERS[name]
    model = nn.Sequential(Plain(note, **attributes), nn.RMSNorm(WIDTH))
    before = {key: all_there_is(value) for key, value in attributes.items()}, list(SEEN), CALLS, Statistics.total
    weight = model[0].weight.detach().clone()
    assert "it changes its" in (said := reason(model[0])) or "it writes to its" in said
    assert [entry.name for entry in patch(model).replaced] == ["1"]
    assert before == ({k: all_there_is(v) for k, v in attributes.items()}, list(SEEN), CALLS, Statistics.total)
    assert torch.equal(model[0].weight, weight)


def test_what_a_closure_and_a_default_hold_is_put_back():
    note, calls = closure()
    assert identify(Plain(note)) is None
    assert calls() == 0
    assert identify(Plain(remember_a_default)) is None
    assert remember_a_default.__defaults__ == ([],)


def test_what_is_only_held_does_no_harm():
    held = Plain(log=[], settings={"layers": [1, 2]}, statistics=Statistics(), others=(Plain(),))
    assert identify(held) == identify(Plain())


@pytest.mark.parametrize("name", DRAWERS)
def test_a_module_that_draws_random_numbers_is_left_alone_and_none_are_drawn(name):
    module = Plain(DRAWERS[name], generator=torch.Generator().manual_seed(3))
    states = [
        lambda: torch.get_rng_state().tolist(),
        random.getstate,
        lambda: repr(np.random.get_state()),
        lambda: module.generator.get_state().tolist(),
        lambda: NUMPY.bit_generator.state,
    ]
    before = [state() for state in states]
    assert "random" in (said := reason(module)) or "it changes its" in said
    patch(nn.Sequential(module, nn.RMSNorm(WIDTH)))
    assert [state() for state in states] == before


def test_a_module_that_prints_is_left_alone_and_prints_nothing(capsys):
    assert reason(Plain(lambda m, x, y: builtins.print("norm", x.shape))) == "it calls print() as it runs"
    assert capsys.readouterr().out == ""


VARIABLE = contextvars.ContextVar("VARIABLE", default=0)
OUTWARD = {
    "log": (lambda m, x, y: logging.getLogger("norm").warning("seen"), "it logs"),
    "file": (lambda m, x, y: pathlib.Path(m.path).write_text("seen"), "it calls open"),
    "environment": (lambda m, x, y: os.environ.update(NORM_SEEN="1"), "it calls putenv"),
    "standard error": (lambda m, x, y: sys.stderr.write("seen"), "it calls write"),
    "context variable": (lambda m, x, y: VARIABLE.set(VARIABLE.get() + 1), "it sets a context variable"),
    "attribute of its input": (lambda m, x, y: setattr(x, "seen", True), "a class or attributes"),
    "attribute of its result": (lambda m, x, y: setattr(y, "seen", True), "a class or attributes"),
}


@pytest.mark.parametrize("name", OUTWARD)
def test_a_module_that_calls_out_is_left_alone_before_it_does(name, tmp_path, capsys, caplog):
    note, said = OUTWARD[name]
    path = tmp_path / "seen"
    assert said in reason(Plain(note, path=str(path)))
    assert not path.exists()
    assert "NORM_SEEN" not in os.environ
    assert VARIABLE.get() == 0
    assert not caplog.records
    assert capsys.readouterr() == ("", "")


def test_what_reading_uses_up_is_not_read():
    numbers = itertools.count()
    assert reason(Plain(lambda m, x, y: next(m.numbers), numbers=numbers)) == "its numbers is used up by reading it"
    assert next(numbers) == 0


class WithPoints(nn.Module):
    """Its children do nothing but carry hooks."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.scale, self.normalised = nn.Identity(), nn.Identity()

    def forward(self, x):
        scale = self.scale((x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt())
        return self.normalised(x / scale) * self.weight


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_a_child_whose_hook_would_fire_no_more_keeps_its_parent(kind):
    assert identify(WithPoints()) is not None
    module = WithPoints()
    getattr(module.normalised, f"register_{kind}")(lambda *_: None)
    assert reason(module) == "a hook of its normalised would fire no more"
    assert not patch(module).replaced
