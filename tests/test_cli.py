import json
import os
import subprocess
import sys

import pytest
import torch

import rmsnorm
from rmsnorm.cli import info, main


def python(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


def test_importing_the_library_needs_torch_alone():
    others = "'rmsnorm.cli', 'rich', 'transformers', 'triton'"
    found = python("-c", f"import rmsnorm, sys; print([name for name in ({others}) if name in sys.modules])")
    assert found.stdout.strip() == "[]", found.stderr


def test_runs_as_a_module():
    found = python("-m", "rmsnorm", "--version")
    assert (found.returncode, found.stdout) == (0, f"rmsnorm {rmsnorm.__version__}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["unknown"],
        ["info", "unknown"],
        ["compare", "--shape", "1024"],
        ["compare", "--shape", "0x64"],
        ["compare", "--dtype", "int8"],
        ["compare", "--rounds", "-1"],
        ["demo", "--rounds", "none"],
    ],
)
def test_wrong_usage_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_an_interrupted_command_says_so_and_exits_with_130(monkeypatch, capsys):
    def interrupt(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(info, "run", interrupt)
    assert main(["info"]) == 130
    assert capsys.readouterr().err == "\nrmsnorm info: interrupted\n"


def test_info_shows_versions_and_kernels(capsys):
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    for name in ("rmsnorm", "torch", "python", "platform"):
        assert facts[name] in text
    assert (facts["gpu_kernels"]["missing"] or "Triton") in text
    assert facts["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads()


def test_compare_prints_a_table_or_json(capsys):
    arguments = ["compare", "--shape", "8x64", "--dtype", "bfloat16", "--rounds", "1"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("RMSNorm beside LayerNorm: 8 x 64, bfloat16, cpu")
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["shape"], found["dtype"]) == ([8, 64], "bfloat16")
