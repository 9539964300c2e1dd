"""Level 2: what every operator refuses before it reads or writes, whichever of its tensors is at fault."""

import pytest
import torch

from rmsnorm.spec import NormSpec
from tests.support.bits import bits_equal
from tests.support.rows import random_rows

ops = torch.ops.rmsnorm
ROWS, COLS, GROUP = 5, 64, 16
OPTIONS = {"eps": 1e-6, "weight_offset": 0.0, "rounding": 0, "group_size": GROUP, "activation": 0, "gate_first": False}
OPTIONS |= {"exact_sum": True, "alpha": 0.5, "rebuilt_dtype": None, "next_eps": 1e-5}
OPTIONS |= {"rotary_dim": COLS, "interleaved": False, "each": False}
OPTIONS |= dict.fromkeys(("need_dx", "need_dgate", "need_dweight"), True)
DOORS = (
    *("forward", "forward_train", "forward_out", "add_forward", "backward"),
    *("gated_forward", "gated_forward_train", "gated_forward_out", "residual_forward", "gated_backward"),
    *("norm_add_forward", "norm_add_norm_forward"),
    *("rotary_forward", "rotary_forward_out", "rotary_backward"),
)


def arguments_of(door, without=()):
    """Arguments that fit together, by name."""
    names = [argument.name for argument in getattr(ops, door).default._schema.arguments]
    tensors = {name: random_rows(ROWS, COLS, torch.float32, seed) for seed, name in enumerate(TENSORS)}
    for name in ("weight", "next_weight"):
        tensors[name] = tensors[name][0].clone()
    tensors["rstd"] = torch.rand(ROWS, 1 if door in ("backward", "rotary_backward") else COLS // GROUP)
    if door == "gated_backward":
        without = (*without, "dh")
    return {name: None if name in without else (tensors | OPTIONS)[name] for name in names}


TENSORS = ("x", "residual", "gate", "weight", "next_weight", "dy", "dh", "rstd", "cos", "sin", "out")
CASES = [
    (door, argument.name)
    for door in DOORS
    for argument in getattr(ops, door).default._schema.arguments
    if argument.name in TENSORS
]


def freed(t):
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def freed_view(t):
    """Its memory would begin behind a null pointer, and not at one."""
    view = torch.stack((t, t))[1]
    view.untyped_storage().resize_(0)
    return view


def shortened(t):
    t = t.clone()
    t.untyped_storage().resize_(t.untyped_storage().nbytes() - 1)
    return t


def shortened_view(t):
    """Its storage is as long as it is itself, but it does not begin where the storage does."""
    view = torch.stack((t, t))[1]
    view.untyped_storage().resize_(t.untyped_storage().nbytes())
    return view


@pytest.mark.parametrize("free", [freed, freed_view, shortened, shortened_view])
@pytest.mark.parametrize(("door", "name"), CASES, ids="-".join)
def test_a_tensor_whose_storage_was_freed_is_an_error(door, name, free):
    arguments = arguments_of(door)
    if name == "dh" and door == "gated_backward":
        arguments |= {"gate": None, "need_dgate": False, "dh": arguments["x"].clone()}
    arguments[name] = free(arguments[name])
    out = arguments.get("out")
    before = out.clone() if out is not None and name != "out" else None
    with pytest.raises(RuntimeError, match=f"{name} has no memory: its storage was freed"):
        getattr(ops, door)(*arguments.values())
    assert before is None or bits_equal(out, before)


@pytest.mark.parametrize("door", DOORS)
def test_freed_tensors_without_elements_have_nothing_to_lose(door):
    arguments = {
        name: freed(value[:0])
        if isinstance(value, torch.Tensor) and name not in ("weight", "next_weight", "out")
        else value
        for name, value in arguments_of(door).items()
    }
    if "out" in arguments:
        arguments["out"] = torch.empty(0, COLS)
    getattr(ops, door)(*arguments.values())


@pytest.mark.parametrize("door", ["forward_out", "gated_forward_out", "rotary_forward_out"])
def test_an_out_that_is_refused_is_not_written(door):
    right = arguments_of(door)
    x = right["x"]
    shared = torch.randn(2 * ROWS, COLS)
    for change in (
        {"out": torch.ones(ROWS, COLS, dtype=torch.bfloat16)},
        {"out": torch.ones(ROWS, COLS + 1)},
        {"out": torch.ones(1, COLS).expand(ROWS, COLS)},
        {"out": torch.ones(ROWS, 2 * COLS)[:, ::2]},
        {"x": shared[:ROWS], "out": shared[1 : ROWS + 1]},
        {"weight": shared[0], "out": shared[:ROWS]},
        *([{"cos": shared[:ROWS], "out": shared[:ROWS]}] if "cos" in right else []),
        *([{"gate": shared[:ROWS], "out": shared[:ROWS]}] if "gate" in right else []),
        {"eps": float("nan"), "out": torch.ones(ROWS, COLS)},
        {"weight": torch.ones(COLS - 1), "out": torch.ones(ROWS, COLS)},
    ):
        arguments = right | change
        before = arguments["out"].clone()
        with pytest.raises(RuntimeError):
            getattr(ops, door)(*arguments.values())
        assert bits_equal(arguments["out"], before), change
    getattr(ops, door)(*(right | {"out": x}).values())


@pytest.mark.parametrize(
    ("door", "change"),
    [
        ("residual_forward", {"residual": torch.ones(ROWS, COLS - 1)}),
        ("residual_forward", {"residual": torch.ones(COLS)}),
        ("residual_forward", {"residual": torch.ones(ROWS, COLS, dtype=torch.float64)}),
        ("residual_forward", {"group_size": 7}),
        ("residual_forward", {"group_size": -COLS}),
        ("residual_forward", {"alpha": float("inf")}),
        ("add_forward", {"residual": torch.ones(ROWS, COLS, dtype=torch.bfloat16)}),
        ("norm_add_forward", {"residual": torch.ones(ROWS, COLS - 1)}),
        ("norm_add_forward", {"weight": torch.ones(COLS - 1)}),
        ("norm_add_norm_forward", {"next_weight": torch.ones(COLS + 1)}),
        ("norm_add_norm_forward", {"next_eps": float("nan")}),
        *(
            (door, change)
            for door in ("rotary_forward", "rotary_backward")
            for change in (
                {"rotary_dim": COLS + 2},
                {"rotary_dim": 0},
                {"rotary_dim": -2},
                {"rotary_dim": COLS - 1},
                {"rotary_dim": COLS - 2},
                {"cos": torch.ones(COLS // 2)},
                {"sin": torch.ones(ROWS + 1, COLS)},
                {"sin": torch.ones(1, ROWS, COLS)},
                {"sin": torch.ones(ROWS, COLS, dtype=torch.bfloat16)},
            )
        ),
        ("rotary_backward", {"dy": torch.ones(ROWS, COLS - 1)}),
        ("gated_forward", {"gate": torch.ones(ROWS, COLS, dtype=torch.float64)}),
        ("gated_forward", {"gate": torch.ones(ROWS, COLS, dtype=torch.int32)}),
        ("gated_backward", {"dh": torch.ones(ROWS, COLS)}),
        ("gated_backward", {"gate": None, "need_dgate": False, "dh": torch.ones(ROWS, COLS - 1)}),
        ("gated_backward", {"gate": None, "need_dgate": False, "dh": torch.ones(ROWS, COLS, dtype=torch.bfloat16)}),
    ],
)
def test_doors_refuse_what_does_not_fit_together(door, change):
    right = arguments_of(door)
    getattr(ops, door)(*right.values())
    with pytest.raises((RuntimeError, ValueError)):
        getattr(ops, door)(*(right | change).values())


def test_what_is_not_wanted_is_none():
    right = arguments_of("gated_backward")
    for unwanted in ("dx", "dgate", "dweight"):
        found = ops.gated_backward(*(right | {f"need_{unwanted}": False}).values())
        assert [t is None for t in found] == [name == unwanted for name in ("dx", "dgate", "dweight")]


def test_a_group_size_of_zero_is_the_whole_row():
    for door in ("gated_forward", "gated_backward", "residual_forward"):
        given = arguments_of(door)
        if "rstd" in given:
            given["rstd"] = torch.rand(ROWS, 1)
        for zero, whole in zip(
            getattr(ops, door)(*(given | {"group_size": 0}).values()),
            getattr(ops, door)(*(given | {"group_size": COLS}).values()),
            strict=True,
        ):
            assert bits_equal(zero, whole)


def test_options_come_in_the_order_of_the_record():
    """Spec in csrc/ops/normalize.h and NormSpec list the same fields, which the wide schemas take in that order."""
    for door in DOORS:
        names = [argument.name for argument in getattr(ops, door).default._schema.arguments]
        named = [name for name in names if name in NormSpec._fields]
        assert named == sorted(named, key=NormSpec._fields.index), door
