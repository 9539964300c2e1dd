"""What reaches the driver: which compilation, device and grid. There is no driver here; see launch_worker.py."""

import pytest

from tests.gpu import processes

CHECKS = (
    *("one_compilation_for_each_kind_of_call", "keys", "alignment", "signatures", "grids", "devices", "forms"),
    *("gated_signatures", "layouts", "replays", "the_short_way", "registrations"),
)


@pytest.fixture(scope="module")
def faults():
    return processes.report(processes.start("tests.gpu.launch_worker"))


def test_all_checks_ran(faults):
    assert set(faults) == set(CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_launches(faults, check):
    assert faults[check] == []
