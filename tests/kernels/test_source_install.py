"""What a source install fetches, and what the source distribution holds."""

import importlib
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def backend(monkeypatch):
    """The build backend, as a build frontend calls it: in the root, with its folder on the path."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT / "buildtools"))
    yield importlib.import_module("backend")
    for name in ("backend", "find_torch"):
        sys.modules.pop(name, None)


def requires_torch(backend):
    found = [hook() for hook in (backend.get_requires_for_build_wheel, backend.get_requires_for_build_editable)]
    asked = [[r for r in requirements if r.startswith("torch")] for requirements in found]
    assert asked[0] == asked[1]
    return asked[0]


def test_a_build_does_not_fetch_the_torch_that_is_installed(backend):
    assert requires_torch(backend) == []


def test_a_build_fetches_torch_where_none_is_installed(backend, monkeypatch, tmp_path):
    venv.create(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    assert requires_torch(backend) == ["torch>=2.10"]


def test_a_build_fetches_torch_where_it_is_too_old(backend, monkeypatch):
    monkeypatch.setattr(sys.modules["find_torch"], "OLDEST", (99, 0))
    assert sys.modules["find_torch"].folder() is None


def test_the_source_distribution_holds_what_the_tests_need(backend, tmp_path):
    name = backend.build_sdist(str(tmp_path))
    with tarfile.open(tmp_path / name) as archive:
        held = {member.partition("/")[2] for member in archive.getnames()}
    committed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if committed.returncode:
        pytest.skip("this is no checkout, so that what it should hold is not known")
    missing = {name for name in committed.stdout.splitlines() if (ROOT / name).exists()} - held
    # What concerns the code host and commits alone.
    missing -= {name for name in missing if name.startswith(".github/")}
    assert missing <= {".ci/run", ".gitignore", ".pre-commit-config.yaml"}
