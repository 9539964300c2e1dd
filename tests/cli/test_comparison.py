from dataclasses import replace

import pytest
import torch

import rmsnorm
from rmsnorm.benchmarking.comparison import NormalizationComparison
from rmsnorm.benchmarking.timing import Timing


def compare(**options):
    return rmsnorm.compare_normalization(**{"dim": 64, "rows": 8, "rounds": 1, **options})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_reports_what_was_compared(dtype):
    found = compare(dtype=dtype)
    assert found.shape == (8, 64)
    assert found.dtype == str(dtype).removeprefix("torch.")
    assert list(found.times) == ["rmsnorm.rms_norm", "F.rms_norm", "F.layer_norm", "copy"]
    assert list(found.backward_times) == ["rmsnorm.rms_norm", "F.rms_norm", "F.layer_norm"]
    assert max(map(len, str(found).splitlines())) <= 80


def test_outputs_differ_by_what_the_mean_does():
    off_centre = compare(dtype=torch.float64, mean=3.0)
    assert off_centre.mean_difference > compare(dtype=torch.float64).mean_difference
    # The rest is rounding: less than one in the last place of float32, seen in float64.
    assert off_centre.mean_difference_centred < torch.finfo(torch.float32).eps


def test_mean_difference_is_that_of_the_formulas():
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1
    mean, mean_square = x.mean(-1, keepdim=True), x.square().mean(-1, keepdim=True)
    expected = (x / mean_square.sqrt() - (x - mean) / (mean_square - mean**2).sqrt()).abs().mean().item()
    assert compare(dtype=torch.float64, mean=1.0, eps=1e-12).mean_difference == pytest.approx(expected)


def test_counts_operations_and_bytes():
    found = compare(dtype=torch.bfloat16)
    assert found.operations == {"RMSNorm": 4, "LayerNorm": 7}
    # x, y and one or two vectors, two bytes an element.
    assert found.bytes_moved == {"RMSNorm": (8 + 8 + 1) * 64 * 2, "LayerNorm": (8 + 8 + 2) * 64 * 2}


def test_prints_only_when_asked(capsys):
    compare()
    assert capsys.readouterr().out == ""
    found = compare(verbose=True)
    assert capsys.readouterr().out == f"{found}\n"


def test_claims_stand_beside_what_was_measured():
    times = {"rmsnorm.rms_norm": 0.25, "F.rms_norm": 4.0, "F.layer_norm": 1.0, "copy": 0.2}
    found = NormalizationComparison(
        shape=(8, 64),
        dtype="float32",
        device="cpu",
        threads=1,
        mean_difference=0.1,
        mean_difference_centred=1e-7,
        operations={"RMSNorm": 4, "LayerNorm": 7},
        bytes_moved={"RMSNorm": 1, "LayerNorm": 1},
        times={name: Timing(seconds, seconds, seconds) for name, seconds in times.items()},
        backward_times={name: Timing(1.0, 1.0, 1.0) for name in times if name != "copy"},
    )
    lines = str(found).splitlines()
    operations, ours, theirs = lines[-3:]
    assert operations.startswith('"30 % fewer operations"')
    assert "43%" in operations
    assert ours.startswith('"15-20 % faster"')
    assert "rmsnorm.rms_norm: 75% less time, backward 0% less" in ours
    assert "F.rms_norm: 300% more time, backward 0% less" in theirs
    forward = lines[lines.index("forward") + 1 : lines.index("backward")]
    assert [line.count("#") for line in forward] == [1, 20, 5, 1]


def test_a_busy_machine_gives_no_shares():
    found = compare()
    quiet = dict.fromkeys(found.times, Timing(1.0, 0.9, 1.1))
    calm = replace(found, times=quiet, backward_times=quiet)
    assert calm.spread == pytest.approx(1.1 / 0.9)
    assert "Too busy" not in str(calm)
    assert "rmsnorm.rms_norm: 0% less time" in str(calm)
    busy = replace(calm, backward_times={**quiet, "copy": Timing(1.0, 0.1, 10.0)})
    assert "quartiles span a factor of 100 (limit 1.5)" in str(busy)
    assert "% less time" not in str(busy)
    assert str(busy).count("not to be told here") == 2


@pytest.mark.parametrize("options", [{"dim": 0}, {"rows": -1}, {"rounds": 0}, {"dtype": torch.int64}])
def test_refuses_what_cannot_be_compared(options):
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=rf"{name} must be .*, got {value}"):
        compare(**options)


def test_every_round_is_announced():
    rounds = []
    compare(rounds=3, each_round=lambda: rounds.append(1))
    assert len(rounds) == 2 * 3  # forward, backward


def test_a_timing_of_one_sample_has_no_spread():
    assert Timing.of([3.0]) == Timing(3.0, 3.0, 3.0)
    assert Timing.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Timing(median=3.0, low=2.0, high=4.0)
