"""Python processes with Triton, which is no dependency: `make .venv/.triton` puts it in a folder of its own.

There it changes nothing for the other tests. torch's own behaviour depends on whether Triton can be imported, and
interpreted kernels and compiled ones cannot live in one process.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(sys.prefix) / "triton"


def start(module, *arguments, interpret=False):
    """`python -m module arguments`, with Triton; skips the test where there is none, but not in CI."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if importlib.util.find_spec("triton") is None:
        if not FOLDER.is_dir():
            reason = "Triton is not installed: make .venv/.triton"
            assert not os.environ.get("CI"), reason
            pytest.skip(reason)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(FOLDER), environment.get("PYTHONPATH"))))
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def report(process):
    """What a process prints as JSON."""
    output, errors = process.communicate()
    assert process.returncode == 0, errors[-5000:]
    return json.loads(output)
