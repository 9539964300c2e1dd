"""Weights that FSDP2 frees between forward and backward: the right gradient, or an error that says what is wrong."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not dist.is_available(), reason="this torch is built without distributed")
def test_fsdp2_frees_weights_after_the_forward():
    command = [sys.executable, "-m", "tests.distributed.resharding_worker"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines() == ["result: True", "inside: weight has no memory: its storage was freed"]
