"""The build backend: scikit-build-core, which gets torch as a requirement only where no torch is installed.

Listed in pyproject.toml's `requires`, torch would be installed a second time for every build, for its headers alone.
"""

from __future__ import annotations

from find_torch import OLDEST, folder
from scikit_build_core import build as _scikit_build
from scikit_build_core.build import *  # noqa: F403 - the hooks, which differ between its versions


def get_requires_for_build_wheel(config_settings: dict[str, str | list[str]] | None = None) -> list[str]:
    return _with_torch(_scikit_build.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: dict[str, str | list[str]] | None = None) -> list[str]:
    return _with_torch(_scikit_build.get_requires_for_build_editable(config_settings))


def _with_torch(requirements: list[str]) -> list[str]:
    return requirements if folder() else [*requirements, f"torch>={'.'.join(map(str, OLDEST))}"]
