"""Results as one page that needs nothing else: tables, and plots that react."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from rmsnorm.cli.bench.measure import Result
from rmsnorm.cli.bench.plot import COLORS


def write(about: dict[str, Any], results: Sequence[Result], path: Path) -> None:
    """Write the page."""
    from plotly.offline import get_plotlyjs

    found = {"about": about, "colors": COLORS, "results": [result.to_json() for result in results]}
    # Nothing in it may end the script that it stands in.
    data = json.dumps(found).replace("<", "\\u003c")
    template = resources.files("rmsnorm.cli.bench").joinpath("page.html").read_text(encoding="utf-8")
    head, _, rest = template.partition("/*PLOTLY*/")
    middle, _, tail = rest.partition("/*DATA*/")
    path.write_text(head + get_plotlyjs() + middle + data + tail, encoding="utf-8")
