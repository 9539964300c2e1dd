"""Prints the README's tables from files of `race.py` (forward and training, one line a shape) in benchmarks/results.

python benchmarks/table.py benchmarks/results/forward-1-thread.jsonl …
"""

import json
import sys
from pathlib import Path

OURS = ("rmsnorm", "rmsnorm out=")
ROOF = ("copy", "clone")


def row(line: dict) -> str:
    """One shape: ours, the copy, and the best of the others."""
    us = line["us"]
    others = {name: t for name, t in us.items() if name not in OURS + ROOF}
    best = min(others, key=others.__getitem__)
    ours = min(us[name] for name in OURS if name in us)
    cells = [
        line["shape"].replace("x", " x "),
        line["dtype"],
        f"{ours:,.1f}",
        f"{ours / us['copy']:.2f}",
        f"{ours / others[best]:.2f} ({best.removesuffix(' out=')})",
        f"{ours / us['F.rms_norm']:.3f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """A table for each file."""
    for name in sys.argv[1:]:
        print(f"**{Path(name).stem.replace('-', ', ', 1).replace('-', ' ')}**\n")
        print("| rows x width | dtype | us | of a copy | of the best other | of F.rms_norm |")
        print("| --- | --- | --- | --- | --- | --- |")
        print("\n".join(row(json.loads(text)) for text in Path(name).read_text().splitlines()) + "\n")


if __name__ == "__main__":
    main()
