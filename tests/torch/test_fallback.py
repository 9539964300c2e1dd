"""Without the compiled library all works as with it: the tests of behaviour run again, in a process without it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = (
    *("torch/test_functional", "torch/test_dtypes", "numerics/test_values", "torch/test_layout", "torch/test_out"),
    *("torch/test_gradients", "torch/test_autograd_engine", "torch/test_derivatives", "torch/test_memory_efficient"),
    *("module/test_module", "module/test_module_state", "module/test_module_in_models"),
    *("torch/test_bad_input", "torch/test_bad_options", "torch/test_unusual_tensors"),
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
from rmsnorm.ops import library
assert not library.status().compiled, library.status()
assert "no C++ compiler" in library.status().reason
import warnings, pytest, rmsnorm, torch
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(3):
        rmsnorm.rms_norm(torch.ones(2, 8))
said = [w for w in said if issubclass(w.category, RuntimeWarning)]
assert len(said) == 1 and "no C++ compiler" in str(said[0].message), said
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def test_without_the_compiled_library():
    environment = {key: value for key, value in os.environ.items() if key != "RMSNORM_ISA"}
    environment["OMP_NUM_THREADS"] = "1"  # these tensors are small: on a busy machine threads wait for each other
    done = subprocess.run(
        [
            *(sys.executable, "-c", WITHOUT_LIBRARY, "-k", f"not ({' or '.join(NOT_AGAIN)})"),
            *(f"tests/{name}.py" for name in FILES),
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
