"""Without the compiled library all works as with it: the tests of behaviour run again, in a process without it."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
FILES = (
    *("functional", "dtypes", "values", "layout", "out"),
    *("gradients", "autograd_engine", "derivatives", "memory_efficient"),
    *("module", "module_state", "module_in_models"),
    *("bad_input", "bad_options", "unusual_tensors"),
)
# Here the reference would be compared with itself, at length.
NOT_AGAIN = (
    "every_pair_of_dtypes",
    "are_the_references",
    "x_rebuilt_from_y",
    "do_not_warn",
    "many_rows",
    "beyond_32_bits",
)

WITHOUT_LIBRARY = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "rmsnorm._C" else find_spec(name, *rest)
from rmsnorm import _ops
assert not _ops.status().compiled, _ops.status()
assert "no C++ compiler" in _ops.status().reason
import pytest
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def test_without_the_compiled_library():
    environment = {key: value for key, value in os.environ.items() if key != "RMSNORM_ISA"}
    environment["OMP_NUM_THREADS"] = "1"  # these tensors are small: on a busy machine threads wait for each other
    done = subprocess.run(
        [
            *(sys.executable, "-c", WITHOUT_LIBRARY, "-k", f"not ({' or '.join(NOT_AGAIN)})"),
            *(str(TESTS / f"test_{name}.py") for name in FILES),
        ],
        cwd=TESTS.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
