"""What the examples of docstrings may name without an import: torch, and what rmsnorm offers."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def names_of_examples(doctest_namespace):
    import torch

    import rmsnorm

    doctest_namespace.update({name: getattr(rmsnorm, name) for name in rmsnorm.__all__}, torch=torch)
