"""Python processes with Triton, which is no dependency: `make .venv/.triton` puts it in a folder of its own.

There it changes nothing for the other tests. torch's own behaviour depends on whether Triton can be imported, and
interpreted kernels and compiled ones cannot live in one process.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(sys.prefix) / "triton"
# What reports of processes depend on, beside the versions of what is installed.
SOURCES = ("src/rmsnorm", "csrc", "tests/gpu", "tests/support", "tests/kernels", "benchmarks")


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


def reports(module, parts, *, interpret=False):
    """What processes of a module print, one for each of `parts`; kept until a source or a version is another.

    Only reports without faults are kept. RMSNORM_GPU_AFRESH=1 runs all processes again.
    """
    files = [ROOT / "build" / "gpu-reports" / f"{module}-{part}-{len(parts)}-{_state()}.json" for part in parts]
    if not os.environ.get("RMSNORM_GPU_AFRESH") and all(file.is_file() for file in files):
        return [json.loads(file.read_text()) for file in files]
    started = [start(module, part, len(parts), interpret=interpret) for part in parts]
    found = [report(process) for process in started]
    for file, facts in zip(files, found, strict=True):
        if not any(isinstance(value, list) and value for value in facts.values()):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(facts))
    return found


@cache
def _state():
    """A hash of the sources, and of the versions and the processor that decide what comes of them."""
    digest = hashlib.sha256()
    for path in sorted(
        p for folder in SOURCES for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".h", ".cpp")
    ):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    triton = [FOLDER] if FOLDER.is_dir() else None
    found = importlib.metadata.distributions(name="triton", **({"path": list(map(str, triton))} if triton else {}))
    versions = [
        importlib.metadata.version("torch"),
        importlib.metadata.version("numpy"),
        sys.version,
        platform.machine(),
    ]
    digest.update("\0".join([*versions, *(d.version for d in found)]).encode())
    return digest.hexdigest()[:32]
