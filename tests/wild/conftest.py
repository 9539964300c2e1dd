"""These tests run other people's code, which is skipped where it is not installed, but not in CI."""

import importlib.util
import os

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/wild" not in item.path.as_posix():
            continue
        needed = [name for mark in item.iter_markers("wild") for name in mark.args]
        missing = [name for name in needed if importlib.util.find_spec(name) is None]
        if missing and not os.environ.get("CI"):
            item.add_marker(pytest.mark.skip(reason=f"not installed: {', '.join(missing)}"))
