"""The script for a real GPU runs where there is none as far as that goes, and says what it finds."""

import json

import pytest

from tests.gpu import processes


def run(*arguments):
    process = processes.start("benchmarks.gpu_check", *arguments)
    output, errors = process.communicate()
    return process.returncode, output, errors


def test_without_a_gpu_it_says_so():
    code, output, errors = run()
    assert code == 2
    assert errors.startswith("gpu_check: ")
    assert "--dry" in errors
    assert output == ""


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    file = tmp_path_factory.mktemp("check") / "lines.jsonl"
    code, _, errors = run("--dry", "--output", file)
    assert code == 0, errors
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_dry_run_goes_through_the_steps(dry):
    assert [line["step"] for line in dry][:: len(dry) - 1] == ["facts", "verdict"]
    assert {"bits", "wrong", "host", "copy", "speed"} <= {line["step"] for line in dry}
    assert {line["form"] for line in dry if "form" in line} == {"floor", "double", "single"}
    assert all("error" not in line and "skipped" not in line for line in dry)
    assert {line["name"] for line in dry if line["step"] == "speed"} >= {"rmsnorm", "F.rms_norm"}


def test_a_dry_run_sees_the_wrong_variant(dry):
    assert [line["seen"] for line in dry if line["step"] == "wrong"] == [True]


def test_what_it_launches_is_compiled_by_all_cores_beforehand(tmp_path, monkeypatch):
    """Into Triton's cache on disk: whoever compiles it again has it at once."""
    program = tmp_path / "ahead.py"
    program.write_text(
        "import json, pathlib, sys\n"
        "from benchmarks import gpu_check\n"
        "from triton.backends.compiler import GPUTarget\n"
        "if __name__ == '__main__':\n"
        "    cache = pathlib.Path(sys.argv[1])\n"
        "    report = gpu_check.Report(cache.with_suffix('.jsonl'), 100)\n"
        "    case = GPUTarget('cuda', 90, 32), 1, 130\n"
        "    gpu_check.precompile(report, [case])\n"
        "    before = len(list(cache.rglob('*.cubin')))\n"
        "    again = gpu_check.compile_case(case)\n"
        "    print(json.dumps([before, again, len(list(cache.rglob('*.cubin')))]))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    process = processes.start("ahead", tmp_path / "cache")
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    before, kernels, after = json.loads(output.splitlines()[-1])
    assert before == after == kernels > 10


def test_faults_decide_the_exit_code(tmp_path, monkeypatch):
    """A process in which the kernels are given another eps than the CPU."""
    program = tmp_path / "off.py"
    program.write_text(
        "import sys\n"
        "sys.argv = ['gpu_check', '--dry', '--output', sys.argv[1]]\n"
        "from benchmarks import gpu_check\n"
        "from rmsnorm.gpu import operators\n"
        "right = operators.forward_train\n"
        "operators.forward_train = lambda x, weight, eps, *rest: right(x, weight, 2 * eps, *rest)\n"
        "sys.exit(gpu_check.main())\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = processes.start("off", tmp_path / "lines.jsonl")
    output, errors = process.communicate()
    assert process.returncode == 1, errors
    lines = [json.loads(line) for line in output.splitlines()]
    assert any("fault" in line for line in lines)
    assert lines[-1]["faults"] > 0
