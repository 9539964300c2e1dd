"""FullyShardedDataParallel of PyTorch 1: two ranks decide alike, and nothing of a freed tensor is read."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("fsdp_worker.py")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("parameters", ["flat", "original"])
def test_both_ranks_decide_alike(parameters, when):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    started = [
        subprocess.Popen(
            [sys.executable, WORKER, str(rank), str(port), parameters, when], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    printed = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    first, second = (json.loads(text.splitlines()[-1]) for text in printed)
    assert first == second
    replaced, reasons, same = first
    assert same
    assert replaced == (2 if when == "before" else 0)
    assert all("FullyShardedDataParallel" in reason for reason in reasons)
    assert bool(reasons) == (when == "after")
