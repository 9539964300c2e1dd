"""Trainers and model makers, run in a process of their own."""

import pytest

from tests.integrations import hosts


@pytest.mark.parametrize("name", hosts.names("trainers_checks"))
def test_trainers(name):
    hosts.assert_passes("trainers_checks", name, "lightning", "litgpt", "torchtitan", "transformers", "triton")
