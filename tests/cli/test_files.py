"""Files that commands write: in any locale, and one line where they cannot."""

import json
import os
import subprocess
import sys

import pytest

from rmsnorm.cli import main

LINES = (
    {"about": {"processor": "Prozessor mit \u2126", "command": "rmsnorm bench"}},
    {
        "what": "forward",
        "name": "mine",
        "shape": "4x64",
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "cache": "warm",
        "contestant": "apex",
        "status": "missing",
        "reason": "nicht da: \u2717",
    },
)
COMMANDS = (
    ["bench", "--quick", "--shapes", "2x64", "--what", "forward", "--dtypes", "float32", "--html"],
    ["bench", "--quick", "--shapes", "2x64", "--what", "forward", "--dtypes", "float32", "--plot"],
    ["bench", "--quick", "--shapes", "2x64", "--what", "forward", "--dtypes", "float32", "--json"],
    ["compare", "--shape", "2x64", "--rounds", "1", "--plot"],
    ["check", "torch", "--only", "eps", "--in-process", "--html"],
)


def test_a_page_is_written_where_the_locale_is_not_utf_8(tmp_path):
    pytest.importorskip("plotly")
    (tmp_path / "lines").write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in LINES), encoding="utf-8")
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "rmsnorm", "bench", "--from", "lines", "--html", "page.html"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **plain}, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "rows x columns" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command[0]} {command[-1]}")
@pytest.mark.parametrize("where", ["a folder", "a full device", "no folder"])
def test_a_file_that_cannot_be_written_is_told_in_one_line(command, where, tmp_path, capsys):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    pytest.importorskip("plotly")
    suffix = {"--html": ".html", "--plot": ".svg", "--json": ".json"}[command[-1]]
    file = tmp_path / f"found{suffix}"
    if where == "a folder":
        file.mkdir()
    elif where == "a full device":
        file.symlink_to("/dev/full")
    else:
        file = tmp_path / "nowhere" / file.name
    try:
        code = main([*command, str(file)])
    except SystemExit as stopped:  # of argparse
        code = stopped.code
    assert code == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told
    last = told.splitlines()[-1]
    assert str(file) in last or str(file.parent) in last
