"""Bandwidth against size as a picture: a panel for each contest, a line for each contestant, the copy as the roof."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rmsnorm.cli.bench.measure import COPY, NCNN, OURS, OURS_IN_PLACE, OURS_OUT, OURS_THEN_COMPILED, Result

# Of middling lightness: they are seen on a white page and on a dark one.
GREY = "#7a828c"
COLORS = {
    COPY: GREY,
    OURS: "#e8590c",
    OURS_OUT: "#f5a623",
    OURS_IN_PLACE: "#c98a5a",
    OURS_THEN_COMPILED: "#b7791f",
    "F.rms_norm": "#1c7ed6",
    "torch.compile": "#7c5cf0",
    "F.layer_norm": "#2f9e44",
    "naive": "#a0703c",
    "vllm": "#0ca3b5",
    "zentorch": "#d6336c",
    "pace": "#e03131",
    NCNN: "#4a7a6a",
    "onnxruntime": "#7a9c12",
    "liger": "#b346c9",
    "quack": "#4c6ef5",
    "flash-attn": "#0b8f68",
    "apex": "#9c6b58",
}
_MARKERS = "osD^vP*Xhpd<>8H1234"


def draw(results: Sequence[Result], path: Path) -> None:
    """Write the picture of everything that was timed, as what the file's name ends in."""
    figure(results).savefig(path, dpi=160)


def figure(results: Sequence[Result], *, transparent: bool = False) -> Any:
    """Return the picture; a transparent one has no colour of its own but those that are seen on any."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    timed = [result for result in results if result.timing is not None]
    rows = list(dict.fromkeys((r.case.what, r.case.device, r.case.threads) for r in timed))
    columns = list(dict.fromkeys((r.case.dtype, r.cache) for r in timed))
    names = list(dict.fromkeys(r.contestant for r in timed))
    per_line = min(len(names), max(3, 3 * len(columns)))
    margin = 0.1 + 0.22 * math.ceil(len(names) / per_line)
    size = 4.0 * max(len(columns), 1.4), 2.9 * len(rows) + margin
    layout = ConstrainedLayoutEngine(rect=(0, margin / size[1], 1, 1 - margin / size[1]))
    drawn = Figure(figsize=size, layout=layout, facecolor="none" if transparent else "white")
    panels = drawn.subplots(len(rows), len(columns), squeeze=False, sharey="row")
    for line, (what, device, threads) in zip(panels, rows, strict=True):
        for panel, (dtype, cache) in zip(line, columns, strict=True):
            where = f"{threads} thread{'s' if threads > 1 else ''}" if device == "cpu" else device
            chosen = [
                r
                for r in timed
                if (r.case.what, r.case.device, r.case.threads, r.case.dtype, r.cache)
                == (what, device, threads, dtype, cache)
            ]
            if not chosen:
                panel.set_axis_off()
                continue
            _panel(panel, f"{what}, {dtype}, {where}, {cache}", chosen, names, transparent)
        line[0].set_ylabel("GB/s", color=GREY if transparent else "black")
    handles = [_line(panels[0][0], [], [], name, names) for name in names]
    legend = drawn.legend(
        handles=handles,
        loc="lower center",
        ncols=per_line,
        frameon=False,
        fontsize=9,
        labelcolor=GREY if transparent else "black",
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    return drawn


def _panel(panel: Any, title: str, results: Sequence[Result], names: Sequence[str], transparent: bool) -> None:
    ink = GREY if transparent else "black"
    shapes = sorted({r.case.shape for r in results}, key=lambda s: (s.rows * s.cols, s.cols))
    panel.set_title(title, fontsize=10, color=ink, parse_math=False)
    panel.set_facecolor("none")
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.yaxis.set_minor_formatter(lambda value, _: "")
    panel.grid(axis="y", which="major", color=GREY, alpha=0.3, linewidth=0.6)
    panel.tick_params(colors=ink, which="both", labelsize=8)
    for side, spine in panel.spines.items():
        spine.set(visible=side in ("left", "bottom"), color=GREY)
    panel.set_xticks(range(len(shapes)), [s.size for s in shapes], rotation=30, ha="right", rotation_mode="anchor")
    panel.set_xlim(-0.4, max(len(shapes) - 0.6, 0.4))
    for name in names:
        found = {r.case.shape: r for r in results if r.contestant == name and r.timing and r.gb_per_s}
        if not found:
            continue
        at = [i for i, shape in enumerate(shapes) if shape in found]
        _line(panel, at, [found[shapes[i]].gb_per_s for i in at], name, names)
        rates = [(found[shapes[i]].gb_per_s, found[shapes[i]].timing) for i in at]
        spans = [(rate * t.median / t.high, rate * t.median / t.low) for rate, t in rates if rate and t]
        panel.vlines(at, *zip(*spans, strict=True), color=COLORS.get(name, GREY), linewidth=3, alpha=0.3)


def _line(panel: Any, x: Sequence[int], y: Sequence[Any], name: str, names: Sequence[str]) -> Any:
    roof, ours = name == COPY, name == OURS
    (line,) = panel.plot(
        x,
        y,
        label="copy (the roof)" if roof else name,
        color=COLORS.get(name, GREY),
        marker="_" if roof else _MARKERS[names.index(name) % len(_MARKERS)],
        markersize=9 if roof else 5 if ours else 4,
        linewidth=2.4 if ours else 1.3,
        linestyle="--" if roof else "-",
        zorder=3 if ours else 2,
    )
    return line
