"""Stored results have today's bits, on every instruction set this machine has and in plain PyTorch."""

import os
import subprocess
import sys

import pytest

from rmsnorm.ops import library
from tests.numerics import bits_file

NO_LIBRARY = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "rmsnorm._C" else find_spec(name, *rest)
from rmsnorm.ops import library
from tests.numerics import bits_file
assert not library.status().compiled
sys.exit(bits_file.main())
"""


def test_the_file_has_every_case_once():
    names = [case.name for case in bits_file.cases()]
    assert len(set(names)) == len(names)
    assert set(names) == set(bits_file.json.loads(bits_file.FILE.read_text()))


@pytest.mark.parametrize("isa", [*library.status().isas, "reference"])
def test_stored_results_have_todays_bits(isa):
    command = ("-c", NO_LIBRARY) if isa == "reference" else ("-m", "tests.numerics.bits_file")
    environment = {**os.environ, "RMSNORM_ISA": "" if isa == "reference" else isa}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "no difference\n", done.stdout + done.stderr


def test_a_bit_that_differs_is_named(monkeypatch):
    case = next(bits_file.cases())
    right = bits_file.results

    def wrong(case):
        found = right(case)
        found["dx"][0, 0] = -found["dx"][0, 0]
        return found

    monkeypatch.setattr(bits_file, "cases", lambda: [case])
    assert bits_file.differences() == ([], {})
    monkeypatch.setattr(bits_file, "results", wrong)
    assert bits_file.differences() == ([f"{case.name}: dx"], {})
