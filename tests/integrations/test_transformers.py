"""transformers with `kernels`, run in a process of their own."""

import pytest

from tests.integrations import hosts


@pytest.mark.parametrize("name", hosts.names("transformers_checks"))
def test_kernels_of_transformers(name):
    hosts.assert_passes("transformers_checks", name, "kernels", "transformers")
