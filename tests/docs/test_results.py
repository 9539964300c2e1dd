"""What is said of speed is what the committed files say."""

import json
import re
from collections import defaultdict

import matplotlib as mpl
import pytest

from benchmarks import report
from tests.docs.markdown import ROOT

RACES = ("forward-1-thread", "forward-2-threads", "training-1-thread", "training-2-threads")
# Of the contestants of `rmsnorm bench`, those that write into memory that is there already.
IN_PLACE = {"copy", "rmsnorm out=", "vllm", "onnxruntime"}
OVERWRITTEN = {"rmsnorm in place", "ncnn in place"}


def test_the_readme_and_the_page_are_what_make_results_writes():
    text = report.README.read_text()
    assert report.with_section(text) == text, "README.md was edited by hand, or results changed: make results"
    assert report.PAGE.read_text() == report.page(), "results changed: make results"


def test_the_picture_is_of_the_committed_results():
    committed = report.PICTURE.read_text()
    assert report.digest() in committed, "results changed: make results"
    assert len(committed) < 100_000
    # Another matplotlib may lay it out in another way.
    if f"Matplotlib v{mpl.__version__}," in committed:
        assert report.picture() == committed


def test_every_file_says_how_it_was_made_and_has_nothing_wrong():
    described = (report.FOLDER / "README.md").read_text()
    files = sorted(report.FOLDER.glob("*.jsonl"))
    raced = [file for file in files if file.name.startswith(("forward", "training"))]
    assert all(f"`{file.name}`" in described for file in files)
    for file in raced:
        about, *lines = map(json.loads, file.read_text().splitlines())
        assert f"`{about['about']['command']}`" in described, file.name
        assert not [line for line in lines if line["status"] == "wrong"]
    assert len(raced) >= 4


def test_a_figure_that_was_changed_by_hand_is_found():
    text = report.README.read_text()
    head, begin, rest = text.partition(report.BEGIN)
    changed = head + begin + rest.replace("float32", "float64", 1)
    assert changed != text
    assert report.with_section(changed) == text


# ---------------------------------------------------------------- the sentences, from the files once more


@pytest.fixture(scope="module")
def times():
    """(file, shape, dtype) -> contestant -> median."""
    found = defaultdict(dict)
    for name in RACES:
        for line in map(json.loads, (report.FOLDER / f"{name}.jsonl").read_text().splitlines()):
            if line.get("status") == "timed":
                found[name, line["shape"], line["dtype"]][line["contestant"]] = line["us"]["median"]
    return found


@pytest.fixture(scope="module")
def section():
    found = re.search(f"{re.escape(report.BEGIN)}(.*){re.escape(report.END)}", report.README.read_text(), re.DOTALL)
    return " ".join(found[1].split())


def races(times):
    """(key, ours, others): fresh beside fresh, in place beside in place, a copy in neither."""
    for key, us in times.items():
        for ours, chosen in (
            ("rmsnorm", us.keys() - IN_PLACE - OVERWRITTEN),
            ("rmsnorm out=", us.keys() & IN_PLACE),
            ("rmsnorm in place", us.keys() & OVERWRITTEN),
        ):
            others = {name: us[name] for name in chosen - {ours, "copy"}}
            if ours in us and others:
                yield key, us[ours], others


def test_the_sentence_of_where_others_lead_follows_from_the_files(times, section):
    said = re.search(
        r"faster in (\d+) of (\d+) contests, most of all (\S+) on (\d+x\d+) in (\w+), .*?took ([\d.]+)", section
    )
    lead = {(key, min(others, key=others.get)): ours / min(others.values()) for key, ours, others in races(times)}
    total = sum(1 for _ in races(times))
    ratios = [ours / min(others.values()) for _, ours, others in races(times)]
    (_, shape, dtype), name = max(lead, key=lead.get)
    assert said.groups() == (
        str(sum(ratio > 1 for ratio in ratios)),
        str(total),
        name,
        shape,
        dtype,
        f"{max(ratios):.2f}",
    )


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_the_sentence_of_copies_follows_from_the_files(times, section, dtype, size):
    ratios = []
    for (name, shape, held), us in times.items():
        rows, cols = map(int, shape.split("x"))
        if name == "forward-1-thread" and held == dtype and rows * cols * size >= 16 * 2**20:
            ratios.append(us["rmsnorm out="] / us["copy"])
    pattern = {
        "float32": r"took ([\d.]+) to ([\d.]+) times as long as a copy in float32",
        "bfloat16": r"and ([\d.]+) to ([\d.]+) times in bfloat16",
    }[dtype]
    low, high = map(float, re.search(pattern, section).groups())
    assert low == float(f"{min(ratios):.2g}")
    assert high == float(f"{max(ratios):.2g}")


def test_figures_of_the_four_rows_are_in_the_files(times, section):
    rows = re.findall(r"\| (\w+) \| (\d+x\d+) \| (\w+) \| \**([\d.,]+)\** \| ([\d.,]+) \|", section)
    assert len(rows) == 4
    for label, shape, dtype, ours, eager in rows:
        us = times[f"{'training' if label == 'training' else 'forward'}-1-thread", shape, dtype]
        for said, contestant in ((ours, "rmsnorm"), (eager, "F.rms_norm")):
            assert float(said.replace(",", "")) == pytest.approx(us[contestant], rel=0.005)  # three digits


def test_nothing_is_said_of_speed_outside_what_is_made_from_the_files():
    text = report.README.read_text()
    said = text[: text.index(report.BEGIN)] + text[text.index(report.END) :]
    for words in (said, (ROOT / "pyproject.toml").read_text()):
        assert not re.search(r"memory speed|[Ff]aster|\d ?(?:us|µs|ms|times|x as)\b|GB/s", words)


def test_the_table_of_compiled_code_is_in_its_file():
    """docs/compile.md: medians rounded to microseconds, and by how much the formula is faster at most."""
    text = (ROOT / "docs" / "compile.md").read_text()
    lines = map(json.loads, (report.FOLDER / "compiled-1-thread.jsonl").read_text().splitlines())
    measured = {(x["what"], x["dtype"].removeprefix("torch."), "x".join(map(str, x["shape"]))): x["us"] for x in lines}
    label, compared = "", 0
    for row in re.findall(r"^\| ([^|]*) ?\| (\d+ x \d+) \| (.*) \|$", text, re.MULTILINE):
        label = row[0].strip() or label
        us = measured[(*label.split(", "), row[1].replace(" ", ""))]
        figures = [cell.strip().partition(",")[0] for cell in row[2].split("|")]
        for figure, name in zip(figures, ("eager", "kernels", "formula", "reference"), strict=True):
            assert figure == (f"{us[name]:.0f}" if name in us else ""), (label, row[1], name)
            compared += figure != ""
    assert compared == sum(map(len, measured.values()))
    ratios = [
        us["formula"] / us["kernels"]
        for (_, dtype, shape), us in measured.items()
        if (dtype, shape[:4]) != ("float32", "1024")
    ]
    most = re.search(r"faster by 0 to (\d+) %", text)[1]
    assert f"{100 * (1 - min(ratios)):.0f}" == most
    assert max(ratios) < 1.005
