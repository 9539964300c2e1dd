"""`make bench-check` on stub timings: what is slower fails, what is noise does not."""

import json
import random

import pytest

from benchmarks import bench_check, turns
from benchmarks.bench_check import Row, compare

ROWS = [Row("forward", 8, 4096, "float32", 1), Row("add", 8, 4096, "float32", 1), Row("out", 1, 64, "bfloat16", 1)]


class Stub:
    """A process whose calls take what it is told: the row's factor, a chance of its own, and noise."""

    def __init__(self, random_, factor, own, noise):
        self.random, self.factor, self.noise = random_, factor, noise
        self.own = 1 + own * random_.uniform(-1, 1)

    def prepare(self, row):
        self.row = row

    def turn(self):
        return 1e-5 * self.factor(self.row) * self.own * (1 + self.noise * self.random.expovariate(1))


def starting(here, seed=0, own=0.0, noise=0.01):
    source = random.Random(seed)

    def start(stack):
        return tuple(Stub(source, factor, own, noise) for factor in (here, lambda row: 1.0, lambda row: 1.0))

    return start


def slower(start):
    return {verdict.row for verdict in compare(ROWS, start, 3) if verdict.slower}


def test_the_row_that_is_slower_fails_and_no_other():
    for seed in range(50):
        assert slower(starting(lambda row: 1.2 if row.what == "add" else 1.0, seed)) == {ROWS[1]}


def test_what_is_equal_or_faster_never_fails_however_noisy_the_machine_is():
    for noise, own in ((0.01, 0.0), (0.3, 0.0), (0.05, 0.1)):
        for seed in range(200):
            assert slower(starting(lambda row: 1.0 if row.what == "add" else 0.7, seed, own, noise)) == set()


def test_what_is_within_the_noise_does_not_fail():
    for seed in range(50):
        assert slower(starting(lambda row: 1.02, seed, noise=0.001)) == set()


def test_one_disturbed_triple_is_no_verdict():
    triples = [bench_check.Triple(2.0, 1.0, 1.0), bench_check.Triple(1.0, 1.0, 1.0), bench_check.Triple(1.1, 1.0, 1.0)]
    assert not bench_check.judge(ROWS[0], triples).slower
    assert bench_check.judge(ROWS[0], triples[:1]).slower


def test_rows_that_look_slower_are_measured_again():
    started = []

    def start(stack):
        started.append(len(started))
        factor = 2.0 if len(started) <= 3 else 1.0  # the first triples alone
        return Stub(random.Random(0), lambda row: factor, 0, 0), *(Stub(random.Random(0), lambda row: 1, 0, 0),) * 2

    assert slower(start) == set()
    assert len(started) == 6


def test_the_report_names_the_row_and_fails(capsys, tmp_path):
    file = tmp_path / "verdicts"
    assert bench_check.report(compare(ROWS, starting(lambda row: 1.5 if row.what == "out" else 1.0), 3), file) == 1
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if line.endswith("SLOWER")] == ["out"]
    assert "1 of 3 rows are slower beyond their noise" in out
    assert [json.loads(line)["slower"] for line in file.read_text().splitlines()] == [False, False, True]
    assert bench_check.report(compare(ROWS, starting(lambda row: 1.0), 3), None) == 0
    assert "no row is slower" in capsys.readouterr().out


def test_a_turn_is_the_least_of_its_samples():
    now, lengths = [0.0], iter([1e-3, 1e-3, 2e-3, 1e-3, 2e-3] + [3e-3] * 100)

    def call():
        now[0] += next(lengths)

    assert turns.turn(call, lambda: now[0]) == pytest.approx(1e-3)


def test_a_process_times_this_checkout():
    from contextlib import ExitStack

    import rmsnorm

    with ExitStack() as stack:
        process = bench_check.Process(None, stack)
        assert process.file == rmsnorm.__file__
        for what in bench_check.WHATS:
            process.prepare(Row(what, 2, 64, "bfloat16", 1))
            assert 0 < process.turn() < 1
