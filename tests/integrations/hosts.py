"""Checks that run beside a host's real package, in a process that finds it.

`make .venv/.hosts` puts small hosts into a folder of their own, in exact versions: with them on the path of all tests
other tests would meet a second transformers. A module of checks runs once, and each of its functions is one test.
"""

import importlib
import inspect
import json
import os
import subprocess
import sys
import traceback
from functools import cache
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix) / "hosts"
BESIDE = [Path(sys.prefix) / name for name in ("wild", "triton")]  # LitGPT; torchtitan wants Triton
WIDE = ("trainers_checks",)
SERVERS = {"servers_checks": "vllm"}  # hundreds of megabytes each: in folders of their own, and not in CI
ROOT = Path(__file__).parents[2]


def names(module):
    """The checks of a module of this folder, without importing it: its hosts may be missing."""
    text = (Path(__file__).parent / f"{module}.py").read_text()
    return [line[4 : line.index("(")] for line in text.splitlines() if line.startswith("def ") and line.endswith("():")]


def assert_passes(module, name, *packages):
    """Runs a module's checks, at the first call, and raises what this one raised."""
    server = SERVERS.get(module)
    if server and not (Path(sys.prefix) / server).is_dir():
        pytest.skip(f"{server} is too large for CI: make {sys.prefix}/.{server}")
    missing = [package for package in packages if not any((p / package).is_dir() for p in (FOLDER, *BESIDE))]
    if missing and not os.environ.get("CI"):
        pytest.skip(f"not in {FOLDER}: {', '.join(missing)}; make .venv/.hosts")
    assert not missing, f"not in {FOLDER}: {', '.join(missing)}"
    outcome = _outcomes(module).get(name, "not reached")
    assert outcome is None, outcome


def _folders(module):
    if module in SERVERS:
        return [Path(sys.prefix) / SERVERS[module]]
    return [FOLDER, *BESIDE] if module in WIDE else [FOLDER]


@cache
def _outcomes(module):
    path = os.pathsep.join(map(str, (*_folders(module), ROOT)))
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "tests.integrations.hosts", module]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def _main(module):
    checks = importlib.import_module(f"tests.integrations.{module}")
    found = {}
    for name in names(module):
        assert not inspect.signature(getattr(checks, name)).parameters
        try:
            getattr(checks, name)()
            found[name] = None
        except Exception:
            found[name] = traceback.format_exc()
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    _main(sys.argv[1])
