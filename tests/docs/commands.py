"""Checks a command of a shell block without running it: the program, its arguments, the files that it names."""

import re
import shlex
import subprocess
from importlib import metadata

from rmsnorm import cli
from tests.docs.markdown import ROOT

EXTRAS = set(metadata.metadata("rmsnorm").get_all("Provides-Extra"))
# Packages of others that a guide may install.
INSTALLED = ("scikit-build-core", "torch", "cmake", "ninja")


def lines(text):
    """Commands of a block, one a line; comments and assignments of variables in front of a command are left out."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words:
            yield words


def check(words, monkeypatch):
    """Raises AssertionError for a command that would not be understood."""
    program, *arguments = words
    checks = {"rmsnorm": rmsnorm, "make": make, "pip": pip, "python": python, "pytest": pytest}
    assert program in checks, f"no test knows the command {program}"
    checks[program](arguments, monkeypatch)


def rmsnorm(arguments, monkeypatch):
    """The real parser accepts the arguments; nothing is run."""
    for command in cli.COMMANDS.values():
        monkeypatch.setattr(command, "run", lambda parsed: 0)
    assert cli.main(arguments) == 0


def make(arguments, monkeypatch):
    assert arguments
    process = subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


def pip(arguments, monkeypatch):
    action, *rest = arguments
    assert action in ("install", "wheel")
    options, packages = [a for a in rest if a.startswith("-")], [a for a in rest if not a.startswith("-")]
    assert set(options) <= {"--no-build-isolation", "--no-deps", "--editable"}
    for package in packages:
        base, _, extras = package.rstrip("]").partition("[")
        assert base in ("rmsnorm", ".", *INSTALLED)
        assert set(filter(None, extras.split(","))) <= EXTRAS


def python(arguments, monkeypatch):
    """The file or module exists, and has the options in its text."""
    name, rest = (arguments[1], arguments[2:]) if arguments[0] == "-m" else (arguments[0], arguments[1:])
    file = ROOT / (name.replace(".", "/") + ".py" if arguments[0] == "-m" else name)
    assert file.is_file(), f"{name} does not exist"
    assert all(option in file.read_text() for option in rest if option.startswith("--"))


def pytest(arguments, monkeypatch):
    assert all((ROOT / name.partition("::")[0]).exists() for name in arguments if not name.startswith("-"))
