"""Text of others cannot steer a terminal, forge lines or fill the screen."""

import pytest

from rmsnorm.cli import main
from rmsnorm.cli.text import LONGEST, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("model.layers.0.norm.weight", "model.layers.0.norm.weight"),
        ("层.0.Größe", "层.0.Größe"),
        ("a\x1b[31mb", "a\\x1b[31mb"),
        ("a\nrmsnorm: all is well", "a\\nrmsnorm: all is well"),
        ("\x9b2J", "\\x9b2J"),
        ("abc\u202edcb", "abc\\u202edcb"),
        ("zero\u200bwidth\u2028line", "zero\\u200bwidth\\u2028line"),
        ("half\ud800", "half\\ud800"),
    ],
)
def test_what_would_steer_a_terminal_stands_as_its_escape(text, shown):
    assert printable(text) == shown
    assert shown.encode().decode() == shown


def test_a_name_of_a_megabyte_is_cut():
    assert printable("x" * 2**20) == "x" * LONGEST + "..."


@pytest.mark.parametrize("command", ["inspect", "check"])
def test_refusals_are_one_line_whatever_the_target_is_called(capsys, command):
    assert main([command, "no\nsuch\x1b[2Jmodule:norm"]) == 2
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert sum(line.startswith("such") for line in said.splitlines()) == 0
