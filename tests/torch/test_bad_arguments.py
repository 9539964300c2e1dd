"""Every argument of every public function with wrong types and values: each is a clear ValueError or TypeError."""

import numpy as np
import pytest
import torch

from rmsnorm import (
    GatedRMSNorm,
    RMSNorm,
    add_rms_norm,
    compile_as,
    fold_offset,
    gated_rms_norm,
    identify,
    patch,
    rms_norm,
    unfold_offset,
    unpatch,
)

X, W = torch.ones(2, 8), torch.ones(8)
NOT_TENSORS = (None, 1.0, [1.0] * 8, "x", np.ones(8))
NOT_NUMBERS = (True, "much", b"1", [1.0], (), object(), 1j, float("nan"), float("inf"), torch.ones(2))
NOT_FLAGS = ("no", 0, 1, None, [], torch.tensor(True))
NOT_CHOICES = ("never", "", None, 0, True, [], ["once"], b"once", torch.ones(1))
NOT_SIZES = (0, -1, 3, 9, 2.0, True, "4", [4], (4, 2), torch.ones(1))
NOT_SHAPES = (0, -8, 7, 8.0, True, "8", (), (2, 0), [8.0], (3, 8), object())
WRONG_TENSORS = (
    torch.ones(2, 8, dtype=torch.int32),
    torch.ones(2, 8, dtype=torch.complex64),
    torch.ones(2, 8).to_sparse(),
)
OPTIONS = {
    "eps": tuple(v for v in NOT_NUMBERS if v is not None),
    "weight_offset": (None, *NOT_NUMBERS),
    "rounding": NOT_CHOICES,
    "group_size": NOT_SIZES,
    "normalized_shape": NOT_SHAPES,
}
WEIGHTS = (*NOT_TENSORS[1:], *WRONG_TENSORS, torch.ones(7), torch.ones(()), torch.ones(3, 8))
RIGHT = {
    rms_norm: {"x": X, "weight": W},
    add_rms_norm: {"x": X, "residual": X, "weight": W},
    gated_rms_norm: {"x": X, "gate": X, "weight": W},
}
TABLE = {
    rms_norm: {
        "x": (*NOT_TENSORS, *WRONG_TENSORS, torch.ones(())),
        "weight": WEIGHTS,
        "out": (*NOT_TENSORS[1:], *WRONG_TENSORS, torch.ones(2, 7), X.double(), X.to("meta")),
        **OPTIONS,
    },
    add_rms_norm: {
        "x": (*NOT_TENSORS, *WRONG_TENSORS, torch.ones(())),
        "residual": (*NOT_TENSORS, *WRONG_TENSORS, torch.ones(2, 7), torch.ones(8), X.double(), X.to("meta")),
        "weight": WEIGHTS,
        "sum": NOT_CHOICES,
        "alpha": (None, *NOT_NUMBERS),
        **OPTIONS,
    },
    gated_rms_norm: {
        "x": (*NOT_TENSORS, *WRONG_TENSORS, torch.ones(())),
        "gate": (*NOT_TENSORS[1:], *WRONG_TENSORS, torch.ones(2, 7), torch.ones(8), X.double(), X.to("meta")),
        "weight": WEIGHTS,
        "activation": NOT_CHOICES,
        "norm_before_gate": NOT_FLAGS,
        "out": (*NOT_TENSORS[1:], *WRONG_TENSORS, torch.ones(2, 7), X.double()),
        **OPTIONS,
    },
}
MODULE = {
    "dim": (None, 0, -1, 8.0, True, "8", (), (2, 0)),
    "eps": (0, -1e-6, *NOT_NUMBERS),
    "weight_offset": (None, *NOT_NUMBERS),
    "rounding": NOT_CHOICES,
    "group_size": NOT_SIZES,
    "elementwise_affine": NOT_FLAGS,
    "dtype": (torch.int64, torch.complex64, "bfloat16", 1),
}
MODULES = {
    RMSNorm: MODULE
    | {
        "sum": NOT_CHOICES,
        "alpha": (None, *NOT_NUMBERS),
        "memory_efficient": NOT_FLAGS,
        "sequence_parallel": NOT_FLAGS,
    },
    GatedRMSNorm: MODULE | {"activation": NOT_CHOICES, "norm_before_gate": NOT_FLAGS},
}
CALLS = [
    *(
        (f, RIGHT[f] | {name: value})
        for f, table in TABLE.items()
        for name, values in table.items()
        for value in values
    ),
    *(
        (c, {"dim": 8} | {name: value})
        for c, table in MODULES.items()
        for name, values in table.items()
        for value in values
    ),
    *((compile_as, {"way": value}) for value in NOT_CHOICES),
    *((f, {"weight": value}) for f in (fold_offset, unfold_offset) for value in NOT_TENSORS),
    *(
        (f, {"module": value})
        for f in (identify, RMSNorm.from_module, GatedRMSNorm.from_module)
        for value in NOT_TENSORS
    ),
    *((patch, {"model": value}) for value in NOT_TENSORS),
    *((unpatch, {"model": value}) for value in NOT_TENSORS),
]


def described(call):
    function, arguments = call
    name = list(arguments)[-1] if function in MODULES else None
    return f"{function.__name__}-{name or ''}-{[type(a).__name__ for a in arguments.values()]}"


@pytest.mark.parametrize(("function", "arguments"), CALLS)
def test_wrong_arguments_are_named(function, arguments):
    with pytest.raises((ValueError, TypeError)) as caught:
        function(**arguments)
    assert str(caught.value)
    assert type(caught.value) in (ValueError, TypeError)


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"dtype": torch.int8}, {"offset": "one"}, {"offset": None}])
def test_wrong_options_of_conversion(options):
    for function in (fold_offset, unfold_offset):
        with pytest.raises((ValueError, TypeError)):
            function(W, **options)


def test_a_dtype_that_is_no_dtype_is_said_to_be_none():
    with pytest.raises(TypeError, match=r"dtype must be a torch.dtype, one of float32, .+, got 'float32'"):
        RMSNorm(8, dtype="float32")
