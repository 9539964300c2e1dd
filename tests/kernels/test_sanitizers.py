"""AddressSanitizer and UndefinedBehaviorSanitizer find nothing in the kernels of any instruction set.

`make sanitize` runs all tests on a whole library built that way. This takes seconds and needs no preloaded runtime:
a program without PyTorch (replay.cpp), whose arrays have exactly the size they need.
"""

import shutil

import pytest

from rmsnorm.ops import library
from tests.kernels import replay


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    assert shutil.which("g++"), "the kernels were compiled, so there is a compiler: g++ not found"
    # Without optimisation nothing is removed before it is checked, and it compiles several times faster.
    options = ["-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    return [str(replay.build(tmp_path_factory.mktemp("replay"), options=options))]


@pytest.mark.parametrize("isa", library.status().isas or ["none"])
def test_kernels_run_clean_under_sanitizers(program, replay_cases, tmp_path, isa):
    assert isa != "none", f"the kernels are not compiled: {library.status().reason}"
    found = replay.differences(program, isa, *replay_cases, tmp_path)
    assert not found, f"{len(found)} differences, the first of them:\n" + "\n".join(found[:10])
