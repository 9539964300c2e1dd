"""The Triton kernels give the bits of the CPU's, under Triton's interpreter, with every form of the sums."""

import pytest

from tests.gpu import cases, processes

PARTS = 2
GROUPS = (*cases.TALL, *cases.SHIPPED, *cases.CHECKS)


@pytest.fixture(scope="module")
def differences():
    """{group: [text, ...]} of all calls, which are divided between two processes."""
    reports = processes.reports("tests.gpu.interpreter_worker", range(PARTS), interpret=True)
    return {group: [text for report in reports for text in report[group]] for group in reports[0]}


@pytest.mark.parametrize("group", GROUPS)
def test_interpreted_kernels_give_the_bits_of_the_cpu(differences, group):
    found = differences[group]
    assert not found, f"{len(found)} differences, the first of them:\n" + "\n".join(found[:10])
