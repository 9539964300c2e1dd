"""The README's results are what `make results` makes of the committed files."""

import json

import matplotlib as mpl

from benchmarks import readme


def test_the_readme_has_what_make_results_writes():
    text = readme.README.read_text()
    assert readme.with_section(text) == text, "README.md was edited by hand, or results changed: make results"


def test_the_picture_is_of_the_committed_results():
    committed = readme.PICTURE.read_text()
    assert readme.digest() in committed, "results changed: make results"
    assert len(committed) < 100_000
    # Another matplotlib may lay it out in another way.
    if f"Matplotlib v{mpl.__version__}," in committed:
        assert readme.picture() == committed


def test_every_file_says_how_it_was_made_and_has_nothing_wrong():
    described = (readme.FOLDER / "README.md").read_text()
    files = sorted(readme.FOLDER.glob("*.jsonl"))
    raced = [file for file in files if file.name.startswith(("forward", "training"))]
    assert all(f"`{file.name}`" in described for file in files)
    for file in raced:
        about, *lines = map(json.loads, file.read_text().splitlines())
        assert f"`{about['about']['command']}`" in described, file.name
        assert not [line for line in lines if line["status"] == "wrong"]
    assert len(raced) >= 4


def test_a_figure_that_was_changed_by_hand_is_found():
    text = readme.README.read_text()
    head, begin, rest = text.partition(readme.BEGIN)
    changed = head + begin + rest.replace("float32", "float64", 1)
    assert changed != text
    assert readme.with_section(changed) == text
