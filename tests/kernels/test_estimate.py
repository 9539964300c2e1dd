"""Level 2: the interval of a sum of products is no answer where its float32 parts overflow (estimate.h).

That takes rows of 2^27 elements and more near the largest float. estimate.cpp sums one element again and again.
"""

import subprocess

import pytest

from rmsnorm.ops import library
from tests.kernels import replay


@pytest.mark.parametrize("isa", library.status().isas or ["none"])
def test_a_sum_that_overflows_is_not_settled(isa, tmp_path):
    _, kernels, own = replay.flags()
    names = (f"-DRMSNORM_ISA_{isa.upper().removesuffix('_BF16')}", *kernels, *own[isa.upper()])
    built = replay.compile_file(tmp_path, "tests/kernels/estimate.cpp", "estimate", *names)
    replay.run("g++", str(built), "-o", str(tmp_path / "estimate"))
    process = subprocess.run([tmp_path / "estimate"], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
