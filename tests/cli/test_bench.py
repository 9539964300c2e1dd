import importlib.util
import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from rmsnorm.benchmarking import peers, timing
from rmsnorm.cli import bench, main
from rmsnorm.cli.bench import contestants, model
from rmsnorm.cli.bench.contestants import Norm, make_call
from rmsnorm.cli.bench.judging import find_error
from rmsnorm.cli.bench.measure import CONTESTANTS, Result
from rmsnorm.cli.bench.shapes import DEFAULT_WHATS, WHATS, Case, Shape, parse
from rmsnorm.cli.bench.tensors import EPS, Inputs
from rmsnorm.patching.replacing import is_patched

SMALL = ["bench", "--shapes", "4x64,3x32", "--dtypes", "float32", "--rounds", "3", "--threads", "1"]
FAST = ["--contestants", "rmsnorm,F.rms_norm,naive"]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def norm_of(formula):
    return lambda case, inputs: Norm(formula)


def case_of(what="forward", rows=6, cols=128, dtype="float32"):
    return Case(what, Shape(rows, cols), dtype, "cpu", 1)


# ---------------------------------------------------------------- judging


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize("name", ["rmsnorm", "F.rms_norm", "F.layer_norm", "naive"])
def test_what_computes_its_formula_is_right(what, dtype, name):
    for rows, cols in ((1, 1), (5, 33), (300, 128), (2, 5000)):
        case = case_of(what, rows, cols, dtype)
        inputs = Inputs.of(case)
        norm = CONTESTANTS[name](case, inputs)
        assert find_error(case, norm.formula, inputs, make_call(case, inputs, norm)()) is None


def sixteen_bit_variance(x, weight):
    return x * torch.rsqrt(x.bfloat16().square().mean(-1, keepdim=True) + EPS).to(x.dtype) * weight


class Backward(torch.autograd.Function):
    """Right forward; dx without the term that comes from the mean of squares."""

    @staticmethod
    def forward(ctx, x, weight):
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
        ctx.save_for_backward(x, weight, rstd)
        return x * rstd * weight

    @staticmethod
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        return dy * weight * rstd, (dy * x * rstd).sum(0)


def last_row_forgotten(x, weight):
    y = F.rms_norm(x, x.shape[-1:], weight, EPS).clone()
    y[-1] = torch.nan
    return y


FAULTS = {
    "eps outside the root": ("forward", lambda x, w: x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-2) * w),
    "eps of another norm": ("forward", lambda x, w: F.rms_norm(x, x.shape[-1:], w, 10 * EPS)),
    "variance in 16 bits": ("forward", sixteen_bit_variance),
    "no weight": ("forward", lambda x, w: F.rms_norm(x, x.shape[-1:], None, EPS)),
    "weight of another norm": ("training", lambda x, w: F.rms_norm(x, x.shape[-1:], 1 + w, EPS)),
    "another formula": ("forward", lambda x, w: F.layer_norm(x, x.shape[-1:], w, None, EPS)),
    "a row of NaN": ("forward", last_row_forgotten),
    "another dtype": ("forward", lambda x, w: F.rms_norm(x, x.shape[-1:], w, EPS).double()),
    "half a dx": ("training", Backward.apply),
    "half a dx, backward alone": ("backward", Backward.apply),
    "h not added": ("add", lambda x, w: F.rms_norm(x, x.shape[-1:], w, EPS)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_contestant_is_named_and_not_timed(fault, monkeypatch, capsys):
    what, formula = FAULTS[fault]
    add = (lambda x, residual, weight: (formula(x, weight), x)) if what == "add" else None
    monkeypatch.setitem(CONTESTANTS, "naive", lambda case, inputs: Norm(formula, add))
    assert main([*SMALL, *FAST, "--what", what, "--json"]) == 1
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()][1:]
    states = {(line["contestant"], line["status"]) for line in found}
    assert states == {("copy", "timed"), ("rmsnorm", "timed"), ("F.rms_norm", "timed"), ("naive", "wrong")}
    assert not any("us" in line for line in found if line["status"] == "wrong")


def _wrong_scale(q, scale):
    return q, scale.flip(0)


def _cut_off(q, scale):
    return (q.double() - 0.6 * q.double().sign()).to(torch.int8), scale


def _one_bit_less(q, scale):
    return (q // 2).to(torch.int8), scale * 2


@pytest.mark.parametrize("spoil", [_wrong_scale, _cut_off, _one_bit_less])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_quantised_result_is_named_and_not_timed(spoil, dtype, monkeypatch, capsys):
    def quantized(x, weight):
        return spoil(*contestants.quantize(F.rms_norm(x, x.shape[-1:], weight, EPS)))

    monkeypatch.setitem(CONTESTANTS, "naive", lambda case, inputs: Norm(None, quantized=quantized))
    arguments = [*SMALL, *FAST, "--what", "quantized", "--dtypes", dtype]
    assert main([*arguments, "--json"]) == 1
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()][1:]
    states = {(line["contestant"], line["status"]) for line in found}
    assert states == {("copy", "timed"), ("rmsnorm", "timed"), ("F.rms_norm", "timed"), ("naive", "wrong")}


def test_quantised_is_asked_for_by_name(capsys):
    """It reads a tensor and writes a quarter of one, or half."""
    assert "quantized" not in DEFAULT_WHATS
    assert case_of("quantized", 2, 8).bytes_moved(4) == 2 * 8 * 5 + 2 * 4 + 8 * 4
    assert main([*SMALL, "--contestants", "rmsnorm,rmsnorm out=", "--what", "quantized,forward", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()][1:]
    assert {line["what"] for line in found if line["contestant"] == "rmsnorm out="} == {"forward"}
    assert {line["what"] for line in found if line["contestant"] == "rmsnorm"} == {"forward", "quantized"}


def test_a_contestant_that_raises_is_missing_with_what_it_raised(monkeypatch, capsys):
    def fails(x, weight):
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setitem(CONTESTANTS, "naive", norm_of(fails))
    assert main([*SMALL, *FAST]) == 0
    assert "not timed: naive: RuntimeError: no kernel image\n" in capsys.readouterr().out


# ---------------------------------------------------------------- the command


def test_every_contest_gets_a_table_of_at_most_80_columns(capsys):
    assert main([*SMALL, *FAST, "--shapes", "4x64,decode,8x64,16x64,32x64,64x64"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    for what in DEFAULT_WHATS:
        for cache in ("warm", "cold"):
            assert f"{what}, float32, 1 thread, {cache} caches" in text
    assert "llama3-8b" in text
    assert text.count("F.rms_norm") == text.count("\n rmsnorm ")


def test_one_shape_alone_gets_quartiles_and_bandwidth(capsys):
    assert main([*SMALL, *FAST, "--shapes", "64x64", "--what", "forward", "--caches", "warm"]) == 0
    text = capsys.readouterr().out
    for head in ("median", "quartiles", "GB/s", "of copy", "/ rmsnorm"):
        assert head in text
    assert re.search(r"rmsnorm +[\d.]+ us.* to [\d.]+ us +[\d.]+ +\d+% +1\.00", text)


def test_lines_say_what_was_measured_and_on_what(tmp_path, capsys):
    file = tmp_path / "found.jsonl"
    assert main([*SMALL, *FAST, "--what", "training", "--json", str(file)]) == 0
    about, *results = lines(file)
    assert about["about"]["torch"] == torch.__version__
    assert {line["cache"] for line in results} == {"warm", "cold"}
    for line in results:
        assert line["us"]["low"] <= line["us"]["median"] <= line["us"]["high"]
        rows, cols = map(int, line["shape"].split("x"))
        # Training reads x, dy and x again, and writes y and dx; the weight is read twice, and its gradient written.
        moved = 4 * (2 * rows * cols if line["contestant"] == "copy" else 5 * rows * cols + 3 * cols)
        assert line["gb_per_s"] == pytest.approx(moved / line["us"]["median"] / 1e3, rel=0.01)
    shown = capsys.readouterr().out
    assert main(["bench", "--from", str(file)]) == 0
    # Times in the file are rounded, and could be again.
    digits = re.compile(r"[\d.]+")
    assert digits.sub("#", capsys.readouterr().out) == digits.sub("#", shown)


def test_a_result_survives_its_line():
    taken = timing.Timing(1e-5, 0.5e-5, 2e-5)
    timed = Result(case_of(), "cold", "rmsnorm", "timed", None, taken, 12.5, 0.75)
    wrong = Result(case_of(), "warm", "naive", "wrong", "y is off")
    for result in (timed, wrong):
        assert Result.from_json(json.loads(json.dumps(result.to_json()))) == result


def test_torch_compile_is_checked_and_timed(capsys):
    arguments = ["--contestants", "rmsnorm,torch.compile", "--shapes", "4x64", "--caches", "warm"]
    assert main([*SMALL, *arguments, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()][1:]
    assert {line["what"] for line in found if line["contestant"] == "torch.compile"} == set(DEFAULT_WHATS)
    assert {line["status"] for line in found} == {"timed"}


def test_quick_leaves_out_torch_compile_and_cold_caches():
    arguments = main_arguments(["--quick"])
    plan = bench.choose_plan(arguments, bench.choose_cases(arguments))
    assert "torch.compile" not in plan.names
    assert plan.caches == ["warm"]
    assert plan.patience * len(bench.choose_cases(arguments)) == bench.QUICK_SECONDS


def main_arguments(arguments):
    import argparse

    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(arguments)


def test_the_list_has_shapes_and_reasons(capsys):
    assert main(["bench", "--list"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"qk-norm +65536x128", text)
    assert re.search(r"rmsnorm +ready", text)
    assert re.search(r"liger +runs on GPUs only", text)


def test_peers_that_are_not_installed_are_missing(monkeypatch, capsys):
    find_spec = peers.importlib.util.find_spec
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda n: None if n == "zentorch" else find_spec(n))
    assert main([*SMALL, "--contestants", "zentorch", "--what", "add"]) == 0
    assert "not timed: zentorch: not installed" in capsys.readouterr().out


def test_a_peer_without_its_operators_says_which_file_is_missing():
    with pytest.raises(peers.Unavailable, match="this installation has no nothing"):
        peers.Peer("torch", ("torch",), libraries=("nothing.so",)).load("cpu")


@pytest.mark.parametrize(
    ("machine", "avx512", "bfloat16", "first"),
    [
        ("x86_64", True, True, "_C.abi3.so"),
        ("x86_64", True, False, "_C_AVX512.abi3.so"),
        ("x86_64", False, False, "_C_AVX2.abi3.so"),
        ("aarch64", False, False, "_C.abi3.so"),
    ],
)
def test_vllm_is_loaded_as_it_loads_itself(monkeypatch, machine, avx512, bfloat16, first):
    monkeypatch.setattr(peers.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bfloat16)
    assert peers.vllm_libraries()[0] == first
    assert peers.vllm_libraries()[-1] == "_C.abi3.so"  # of an installation for GPUs, the only one


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_place_only_the_first_call_has_the_weight(dtype):
    """So that what is checked is the norm, and what is timed stays in the range of ordinary numbers."""
    case = case_of(dtype=dtype)
    inputs = Inputs.of(case)
    call = make_call(case, inputs, CONTESTANTS["rmsnorm in place"](case, inputs))
    assert find_error(case, "RMSNorm", inputs, call()) is None
    for _ in range(300):
        (y,) = call()
    assert 0.9 < float(y.float().square().mean()) < 1.1


@pytest.mark.parametrize("text", ["decode", "llama3-8b", "qk-norm", "all", "16x32"])
def test_shapes_go_by_parts_of_names(text):
    found = parse(text)
    assert found
    assert text == "all" or all(text in str(shape) for shape in found)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shapes", "nowhere"], "qk-norm"),
        (["--shapes", ""], "ROWSxCOLS"),
        (["--shapes", "4x0"], "ROWSxCOLS"),
        (["--what", "sideways"], "forward, add, backward, training"),
        (["--dtypes", "float32,int8"], "int8"),
        (["--threads", "0"], "at least 1"),
        (["--threads", "1,9999"], f"at most {os.cpu_count()}, the processors of this machine, got 9999"),
        (["--contestants", "nobody"], "onnxruntime"),
        (["--device", "moon"], "moon"),
        (["--device", "cuda:77"], "sees"),
        (["--rounds", "1.5"], "1.5"),
    ],
)
def test_wrong_arguments_are_named_with_what_is_allowed(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *arguments])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_a_file_of_something_else_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "other").write_text('{"a": 1}\n')
    for path in ("other", "missing"):
        assert main(["bench", "--from", str(tmp_path / path)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "--what", "add"], "--model and --what"),
        (["--model", "--html", "page.html"], "--model and --html"),
        (["--from", "file", "--quick"], "--from and --quick"),
        (["--decode", "3"], "--decode is for --model"),
        (["--model", "/nowhere"], "does not exist"),
        (["--model", "--prefill", "100000"], "takes 2048 tokens"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(arguments, said, capsys):
    if arguments[0] == "--model" and not importlib.util.find_spec("transformers") and not os.environ.get("CI"):
        pytest.skip("transformers is not installed; `make demo` installs it")
    assert main(["bench", *arguments]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_needs_are_named_only_if_asked_for(monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    hidden = "rich", "matplotlib", "plotly"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in hidden else find_spec(name))
    assert main([*SMALL, *FAST, "--what", "forward", "--json"]) == 0
    capsys.readouterr()
    for arguments, needed in (([], "rich"), (["--json", "--plot", "x.svg"], "matplotlib")):
        assert main([*SMALL, *FAST, *arguments]) == 2
        assert f'not installed: {needed}; try: pip install "rmsnorm[bench]"\n' in capsys.readouterr().err


@pytest.mark.demo
def test_a_model_is_timed_before_and_after_patch(tmp_path, capsys):
    if not importlib.util.find_spec("transformers") and not os.environ.get("CI"):
        pytest.skip("transformers is not installed; `make demo` installs it")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 99, **sizes}))
    arguments = ["--prefill", "8", "--decode", "2", "--rounds", "1", "--threads", "1", "--dtypes", "bfloat16"]
    assert main(["bench", "--model", str(tmp_path), *arguments]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert main(["bench", "--model", str(tmp_path), *arguments, "--json"]) == 0
    _, *found = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert [(line["phase"], line["tokens"], line["norms_are"]) for line in found] == [
        ("prefill", 8, "before"),
        ("prefill", 8, "after"),
        ("decode", 2, "before"),
        ("decode", 2, "after"),
    ]
    for line in found:
        assert line["tokens_per_s"] == pytest.approx(line["tokens"] / line["whole"]["median"], rel=1e-3)
        assert 0 < line["share_of_norms"] < 1


@pytest.mark.demo
def test_a_model_goes_back_and_forth_between_its_norms_and_ours(tmp_path):
    if not importlib.util.find_spec("transformers") and not os.environ.get("CI"):
        pytest.skip("transformers is not installed; `make demo` installs it")
    language = model.PatchedModel(model.TINY)
    language.use_dtype(torch.float32)
    own = {name: type(norm) for name, norm in language.norms["before"].items()}
    assert len(own) == 17
    for which, patched in (("before", False), ("after", True), ("before", False)):
        language.use_norms(which)
        assert {is_patched(norm) for norm in language.norms[which].values()} == {patched}


# ---------------------------------------------------------------- interrupted


def test_what_was_measured_before_an_interrupt_is_kept(monkeypatch, tmp_path, capsys):
    seen = []

    def maker(case, inputs):
        seen.append(case)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return CONTESTANTS["F.rms_norm"](case, inputs)

    monkeypatch.setitem(CONTESTANTS, "naive", maker)
    file = tmp_path / "found.jsonl"
    assert main([*SMALL, *FAST, "--json", str(file)]) == 130
    captured = capsys.readouterr()
    assert "forward, float32, 1 thread, warm caches" in captured.out
    assert captured.err.endswith("\nrmsnorm bench: interrupted\n")
    assert {(line["shape"], line["cache"]) for line in lines(file)[1:]} == {
        (shape, cache) for shape in ("4x64", "3x32") for cache in ("warm", "cold")
    }


def test_ctrl_c_ends_a_run_with_130():
    command = [sys.executable, "-m", "rmsnorm", *SMALL, *FAST, "--rounds", "100000", "--json"]

    def heed_ctrl_c():  # which shells tell the jobs that they start in the background to ignore
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ, preexec_fn=heed_ctrl_c
    )
    try:
        assert "about" in running.stdout.readline()
        while "forward" not in running.stderr.readline():
            assert running.poll() is None
        running.send_signal(signal.SIGINT)
        _, error = running.communicate(timeout=60)
    finally:
        running.kill()
        running.communicate()
    assert running.returncode == 130
    assert "Traceback" not in error


# ---------------------------------------------------------------- racing


def test_cold_turns_are_single_calls_after_an_eviction():
    called = []
    times = timing.race(
        {"a": lambda: called.append("a"), "b": lambda: called.append("b")},
        torch.device("cpu"),
        2,
        evict=lambda: called.append("evict"),
    )
    assert "".join(c[0] for c in called[called.index("evict") :]) == "eaebeaeb"
    assert set(times) == {"a", "b"}


def test_patience_ends_a_race_after_three_rounds():
    rounds = []
    timing.race({"a": lambda: None}, torch.device("cpu"), 100, 1e-4, patience=0.0, each_round=lambda: rounds.append(1))
    assert len(rounds) == 3


def test_a_cold_call_on_an_accelerator_waits_in_line_behind_evictions(monkeypatch):
    """Nothing waits for the device between them, or the host's time would be measured."""
    done = []

    class Event:
        def __init__(self, device, enable_timing):
            assert enable_timing

        def record(self):
            done.append("record")

        def elapsed_time(self, end):
            assert done[-1] == "finish"
            return 2.5

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(timing, "_finish", lambda device: done.append("finish"))
    device = torch.device("meta")
    evict = timing.make_evict(device)
    seconds = timing._seconds_after(lambda: done.append(evict()._version), lambda: done.append("call"), device)
    assert seconds == 2.5e-3
    assert done == [timing.EVICTIONS, "record", "call", "record", "finish"]


def test_eviction_writes_more_than_the_caches_hold():
    evict = timing.make_evict(torch.device("cpu"))
    assert evict().nbytes >= 2 * timing.cache_size(torch.device("cpu")) > 1 << 20


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.234e-6, "1.23 us"), (9.996e-6, "10.0 us"), (9.996e-4, "1.00 ms"), (0.214555, "215 ms"), (2.5, "2.50 s")],
)
def test_durations_have_three_digits(seconds, text):
    assert timing.duration(seconds) == text
