"""Every program in examples/ runs as its first lines say, and prints what it found."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs(path, tmp_path):
    command = path.read_text().partition("\n\n")[2].partition("\n")[0]
    assert command == f"python examples/{path.name}"
    # Wherever it is called from.
    run = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, capture_output=True, text=True, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "2"}, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()


def test_there_are_examples():
    assert {path.stem for path in EXAMPLES} >= {"train_gpt", "patch_model", "residual_block", "distributed", "export"}
