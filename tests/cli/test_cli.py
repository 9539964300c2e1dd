import json
import os
import subprocess
import sys

import pytest
import torch

import rmsnorm
from rmsnorm.cli import compare, info, main
from rmsnorm.gpu import availability
from rmsnorm.ops import library


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
        ["compare", "--plot", "found.pdf"],
        ["compare", "--plot", "nowhere/found.png"],
        ["compare", "--device", "moon"],
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


@pytest.mark.parametrize("arguments", [["info"], ["--help"], ["compare", "--shape", "2x8", "--rounds", "1"]])
def test_output_that_nobody_reads_is_no_error(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "rmsnorm", *arguments]
    # Unbuffered, argparse itself meets the error, and says nothing.
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    found = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, env=buffered)
    os.close(writer)
    assert found.returncode == 141
    assert "Traceback" not in found.stderr
    assert "BrokenPipe" not in found.stderr


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
    assert facts["processor"] in text
    assert 1 <= facts["cores"] <= os.cpu_count()


def test_info_names_what_is_missing_with_what_installs_it(monkeypatch, capsys):
    monkeypatch.setattr(info, "version", lambda package: None if package == "plotly" else "1.2.3")
    monkeypatch.setattr(library, "_status", library.Status(False, "no compiler was found"))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line in (
        "CPU kernels   not compiled: no compiler was found",
        'for bench     rich 1.2.3, matplotlib 1.2.3, plotly missing; try: pip install "rmsnorm[bench]"',
        "for demo      transformers 1.2.3, accelerate 1.2.3, gguf 1.2.3",
    ):
        assert line in lines
    assert any("OMP_NUM_THREADS=3" in line for line in lines)
    reason = availability.missing()
    assert reason is None or f"GPU kernels   none: {reason}" in lines


@pytest.mark.parametrize(("capability", "line"), [((6, 1), "none: Triton compiles for sm_70"), ((9, 0), "Triton")])
def test_info_says_whether_the_gpu_that_is_there_has_kernels(capability, line, monkeypatch, capsys):
    monkeypatch.setattr(availability, "missing", lambda: None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert main(["info"]) == 0
    assert f"GPU kernels   {line}" in capsys.readouterr().out


def test_compare_prints_a_table_or_json(capsys):
    arguments = ["compare", "--shape", "8x64", "--dtype", "bfloat16", "--rounds", "1"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("RMSNorm beside LayerNorm: 8 x 64, bfloat16, cpu")
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["shape"], found["dtype"]) == ([8, 64], "bfloat16")
    assert set(found["backward_times"]) == {"rmsnorm.rms_norm", "F.rms_norm", "F.layer_norm"}


@pytest.mark.parametrize("name", ["found.svg", "found.png"])
def test_compare_draws_a_picture(name, tmp_path, capsys):
    path = tmp_path / name
    assert main(["compare", "--shape", "8x64", "--rounds", "1", "--mean", "2", "--plot", str(path)]) == 0
    assert path.read_bytes()[:5] == (b"<?xml" if name.endswith("svg") else b"\x89PNG\r")


def test_the_outputs_part_as_the_mean_grows():
    means, apart = compare.mean_effect(64, 3.0)
    assert (means[0], means[-1]) == (0.0, 3.0)
    # The mean of 64 numbers is not quite 0.
    assert apart[0] < 0.15
    assert apart[1:] == sorted(apart[1:])
