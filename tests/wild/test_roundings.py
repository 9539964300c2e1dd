"""The three rounding conventions are those of transformers' classes, to the bit, where rstd is one number for all."""

import importlib

import pytest
import torch

import rmsnorm
from tests.support.bits import same
from tests.support.rows import DTYPES, random_rows, rows_of_known_rms

pytestmark = pytest.mark.wild("transformers")

WIDTH = 64
FAMILIES = {
    ("llama", "LlamaRMSNorm"): {"rounding": "before_scale"},
    ("gemma", "GemmaRMSNorm"): {"rounding": "once", "weight_offset": 1.0},
    ("t5", "T5LayerNorm"): {"rounding": "weight_dtype"},
}


@pytest.mark.parametrize("w_dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family[0])
def test_a_convention_gives_the_bits_of_its_family(family, x_dtype, w_dtype):
    model, name = family
    x, eps, _ = rows_of_known_rms(WIDTH)
    x = x.to(x_dtype)
    theirs = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)(WIDTH, eps=eps)
    theirs.weight.data = random_rows(1, WIDTH, w_dtype, 2)[0]
    with torch.no_grad():
        same(rmsnorm.rms_norm(x, theirs.weight, eps, **FAMILIES[family]), theirs(x))
