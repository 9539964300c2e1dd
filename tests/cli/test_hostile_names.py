"""Names and messages of others in what `check`, `bench` and `compare` show: on a terminal, as text, JSON, pages."""

import contextlib
import io
import json
import re
import sys

import pytest

from rmsnorm.cli import main
from rmsnorm.cli.bench.contestants import Norm
from rmsnorm.cli.bench.measure import CONTESTANTS

# Sequences that clear a screen or write backwards, new lines, tags, markup and emoji of rich, mathematics
# of matplotlib, half a character, and what ends a script.
NAME = "no\x1b[2Jrm\nforged [bold]:smile:[/] \u202e$\\frac$\x9b2J\ud800</script><b>\r\u2028"
# As the name of a file, which is bytes, and these are no UTF-8.
PATH = NAME.replace("/", "|").replace("\ud800", "\udc80")
LINE = {
    "what": NAME,
    "name": NAME,
    "shape": "4x64",
    "dtype": NAME,
    "device": NAME,
    "threads": 1,
    "cache": NAME,
    "contestant": NAME,
}
TIMED = LINE | {"status": "timed", "us": {"median": 2.0, "low": 1.0, "high": 3.0}, "gb_per_s": 1.0, "of_copy": 0.5}
FILE = (
    {"about": {"processor": NAME, "command": NAME, NAME: NAME}},
    TIMED,
    TIMED | {"contestant": f"_{NAME}"},
    TIMED | {"shape": "8x64"},
    LINE | {"status": "wrong", "reason": NAME},
    LINE | {"status": "missing", "reason": NAME},
)


class _Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(params=["text", "terminal"])
def show(request, monkeypatch, capsys):
    """Run a command; what it wrote to standard output and error, without the colours that are rich's own."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments):
        out = _Terminal() if request.param == "terminal" else io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            main([*map(str, arguments)])
        return re.sub(r"\x1b\[[\d;]*m", "", out.getvalue()), capsys.readouterr().err

    return run


def harmless(*texts):
    """Whether a terminal only shows these lines, and none of them is forged."""
    for text in texts:
        text.encode()
        assert all(c.isprintable() or c == "\n" for c in text), ascii(text)
        assert not any(line.startswith("forged") for line in text.splitlines())
    return True


NORM = """
import torch
class Bad(Exception): pass
Bad.__name__ = {name!r}.encode("ascii", "ignore").decode()
def norm(x, weight, eps=1e-6):
    if x.dtype == torch.float16: raise Bad({name!r})
    if x.dtype == torch.bfloat16: raise ValueError("no dtype " + {name!r})
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
"""


@pytest.fixture
def target(tmp_path, monkeypatch):
    """A file whose name and whose exceptions are hostile."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{PATH}.py").write_text(NORM.format(name=NAME))
    return f"{PATH}.py"


ONLY = ("--only", "accuracy", "--only", "row-factor", "--in-process")


def test_check_shows_names_and_messages_as_they_are_written(show, target, tmp_path):
    page = tmp_path / f"{target}.html"
    out, err = show("check", target, *ONLY, "--html", page)
    assert harmless(out, err)
    assert "[bold]:smile:[|]" in out
    assert "it raises" in out
    assert "wrote" in err
    text = page.read_text(encoding="utf-8")
    assert harmless(text)
    assert "<b>\\r" not in text
    assert "</script>" not in text
    out, err = show("check", f"{target}:no\nforged", *ONLY)
    assert harmless(out, err)
    out, err = show("check", "torch", f"--{NAME}")
    assert harmless(out, err)
    assert "unrecognized arguments" in err


def test_a_report_in_json_is_json(capsys, target):
    assert main(["check", target, *ONLY, "--json"]) == 1
    report = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert harmless(*_texts(report))


def _texts(found):
    if isinstance(found, str):
        yield found
    elif isinstance(found, (dict, list)):
        for part in found.items() if isinstance(found, dict) else found:
            yield from _texts(list(part) if isinstance(part, tuple) else part)


@pytest.fixture
def lines(tmp_path):
    pytest.importorskip("rich")
    path = tmp_path / "lines"
    path.write_text("\n".join(map(json.dumps, FILE)))
    return path


@pytest.mark.filterwarnings("ignore:Glyph")
def test_bench_shows_what_a_file_says_as_it_is_written(show, lines, tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("plotly")
    page, picture = tmp_path / "page.html", tmp_path / "picture.svg"
    out, err = show("bench", "--from", lines, "--html", page, "--plot", picture)
    assert harmless(out, err)
    assert "[bold]" in out
    assert out.count(":smile:") >= 3
    assert harmless(picture.read_text())
    data = re.search(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL).group(1)
    assert "<" not in data
    assert harmless(*_texts(json.loads(data, parse_constant=pytest.fail)["results"]))


@pytest.mark.parametrize(
    "damage",
    [
        {"us": {"median": float("nan"), "low": 1.0, "high": 1.0}},
        {"us": {"median": "1", "low": 1.0, "high": 1.0}},
        {"gb_per_s": NAME},
        {"of_copy": float("inf")},
        {"status": NAME},
        {"threads": NAME},
        {"shape": NAME},
        {"contestant": 3},
        {"us": [[[]]]},
    ],
    ids=lambda damage: next(iter(damage)),
)
def test_a_line_that_is_none_is_refused(show, lines, damage):
    lines.write_text(json.dumps(TIMED | damage))
    out, err = show("bench", "--from", lines)
    assert out == ""
    assert "has not the lines of `rmsnorm bench --json`" in err
    assert harmless(err)


def test_bench_shows_what_contestants_say_as_it_is_written(show, monkeypatch, tmp_path):
    def raises(case, inputs):
        raise RuntimeError(NAME)

    def wrong(case, inputs):
        return Norm(lambda x, weight: x)

    for name in {*CONTESTANTS} - {"rmsnorm"}:
        monkeypatch.delitem(CONTESTANTS, name)
    monkeypatch.setitem(CONTESTANTS, "bad", raises)
    monkeypatch.setitem(CONTESTANTS, "wrong", wrong)
    monkeypatch.setattr(sys, "argv", ["rmsnorm", NAME])
    quick = "bench", "--quick", "--rounds", "1", "--shapes", "2x64", "--what", "forward", "--dtypes", "float32"
    file = tmp_path / "found.jsonl"
    out, err = show(*quick, "--json", file)
    assert "RuntimeError" in out
    assert harmless(out, err)
    assert harmless(*(text for line in file.read_text().splitlines()[:1] for text in _texts(json.loads(line))))
    assert harmless(*show("bench", "--list"))


@pytest.mark.parametrize("option", ["--plot", "--html", "--json", "--from", "--model"])
def test_a_path_that_does_not_do_is_told_in_one_line(show, tmp_path, option):
    pytest.importorskip("plotly")
    suffix = {"--plot": ".svg", "--html": ".html"}.get(option, "")
    folder = tmp_path / f"{PATH}{suffix}"
    folder.mkdir()
    for path in (folder, tmp_path / "nowhere" / folder.name):
        out, err = show("bench", *(("--shapes", "2x64") if suffix else ()), option, path)
        assert PATH[:2] in err
        assert harmless(out, err)
    if option == "--plot":
        out, err = show("compare", "--shape", "2x64", option, folder)
        assert "cannot write" in err
        assert harmless(out, err, *show("compare", "--shape", NAME))
