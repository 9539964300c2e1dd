"""What the tests share as fixtures. Plain functions are in bits.py and rows.py."""

from contextlib import contextmanager

import pytest
import torch

from tests.kernels import kernel_cases, replay
from tests.support import bits

# What takes minutes, by the beginning of its name: `make test` leaves it out, `make test-all` runs it.
EXHAUSTIVE = (
    "tests/cli/test_demo.py::test_a_real_language_model",
    "tests/cli/test_inspect_fuzz.py",
    "tests/conformance/test_conformance.py",
    "tests/distributed/",
    "tests/gpu/",
    "tests/integrations/",
    "tests/kernels/test_kernels.py",
    "tests/kernels/test_neon.py",
    "tests/kernels/test_sanitizers.py",
    "tests/numerics/test_reference",
    "tests/torch/test_compiled_models.py",
    "tests/torch/test_export.py",
    "tests/torch/test_fallback.py",
    "tests/wild/",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid.startswith(EXHAUSTIVE):
            item.add_marker("exhaustive")


@pytest.fixture(scope="session")
def bits_equal():
    """`bits_equal(a, b)`: the same dtype, shape and bit patterns, with NaN equal to NaN."""
    return bits.bits_equal


@pytest.fixture(scope="session")
def assert_bits_equal():
    """`assert_bits_equal(a, b)`, which says where the first difference is."""

    def check(actual, expected):
        assert (found := bits.difference(actual, expected)) is None, found

    return check


@pytest.fixture(scope="session")
def with_threads():
    """A context manager, given n: torch uses n threads inside, and as many as before afterwards."""

    @contextmanager
    def use(n):
        before = torch.get_num_threads()
        torch.set_num_threads(n)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    return use


@pytest.fixture(scope="session")
def replay_cases(with_threads):
    """Cases of every group, as replay.py encodes them, without the largest: an emulator and sanitizers are slow."""
    with with_threads(1):
        found = [c for group in kernel_cases.GROUPS.values() for c in group() if c.arguments[0].numel() < 50_000]
    return found, replay.encode_all(found)
