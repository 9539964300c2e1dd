"""The report as one page of HTML, with nothing to load and nothing to run."""

from __future__ import annotations

from html import escape

from rmsnorm.cli.check.report import Report
from rmsnorm.conformance import Result
from rmsnorm.conformance.outcome import FAIL, NOT_APPLICABLE, NOT_PROMISED, NOT_RUN, PASS, REFUSED

_MARKS = {
    PASS: "&#10003;",
    FAIL: "&#10007;",
    NOT_PROMISED: "&#9675;",
    REFUSED: "&#9675;",
    NOT_APPLICABLE: "&ndash;",
    NOT_RUN: "&hellip;",
}
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #66707a; --line: #e4e8ec; --paper: #fff; --card: #f7f9fa;
  --pass: #1a7f4b; --fail: #c62f2f; --promise: #9a6b00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --soft: #97a1ab; --line: #2b3138; --paper: #14181c;
  --card: #1b2026; --pass: #4cc38a; --fail: #ff7a70; --promise: #e0b04a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 3rem 1.5rem 4rem; max-width: 60rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
header { display: flex; gap: 2rem; align-items: center; }
h1 { margin: 0 0 .25rem; font-size: 1.9rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 2.5rem 0 .5rem; font-size: 1.05rem; }
p { margin: .15rem 0; }
.soft, td p { color: var(--soft); font-size: .88rem; }
.form { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, monospace; font-size: .95rem; margin-top: .6rem; }
.ring { flex: none; width: 7.5rem; height: 7.5rem; border-radius: 50%; display: grid; place-items: center; }
.ring div { width: 6rem; height: 6rem; border-radius: 50%; background: var(--paper); display: grid;
  align-content: center; text-align: center; font-size: 1.5rem; font-weight: 650; line-height: 1.1; }
.ring small { font-size: .75rem; font-weight: 400; color: var(--soft); }
table { width: 100%; border-collapse: collapse; }
td { padding: .55rem .75rem .55rem 0; border-top: 1px solid var(--line); vertical-align: top; }
td.name { width: 40%; }
td.verdict { width: 9.5rem; white-space: nowrap; }
td.measured { font-variant-numeric: tabular-nums; }
.pass { color: var(--pass); } .fail { color: var(--fail); font-weight: 650; } .promise { color: var(--promise); }
.none { color: var(--soft); }
.findings { background: var(--card); border-left: 4px solid var(--fail); border-radius: 6px; padding: .9rem 1.2rem; }
.findings p + p { margin-top: .5rem; }
@media (max-width: 40rem) { header { flex-direction: column; align-items: flex-start; } td { display: block; border: 0;
  padding: .1rem 0; width: auto !important; }
  tr { display: block; border-top: 1px solid var(--line); padding: .5rem 0; } }
@media print { body { padding: 0; } }
"""
_CLASSES = {
    PASS: "pass",
    FAIL: "fail",
    NOT_PROMISED: "promise",
    REFUSED: "promise",
    NOT_APPLICABLE: "none",
    NOT_RUN: "none",
}


def page(report: Report) -> str:
    """The whole page."""
    score = report.score
    share = score.passed / score.scored if score.scored else 0.0
    colour = "var(--fail)" if report.findings else "var(--pass)"
    form = next((r.measured for r in report.results if r.name == "convention" and r.verdict == PASS), "")
    about = [report.source, f"called as {report.calls}", report.where]
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>rmsnorm check {escape(report.implementation)}</title><style>{_STYLE}</style></head><body>",
        f'<header><div class="ring" style="background: conic-gradient({colour} {share:.2%}, var(--line) 0)">'
        f"<div>{score.passed}/{score.scored}<br><small>checks passed</small></div></div>",
        f"<div><h1>{escape(report.implementation)}</h1>",
        *(f'<p class="soft">{escape(line)}</p>' for line in about if line),
        f'<p class="form">{escape(form)}</p></div></header>',
    ]
    if report.findings:
        parts.append('<h2>Findings</h2><section class="findings">')
        parts += [f"<p><b>{escape(r.name)}</b>: {escape(r.finding or r.measured)}</p>" for r in report.findings]
        parts.append("</section>")
    for title, results in report.groups:
        said = [r.meaning for r in results]
        parts += [f"<h2>{escape(title)}</h2><table>"]
        parts += [_row(r, r.meaning if said.index(r.meaning) == i else "") for i, r in enumerate(results)]
        parts += ["</table>"]
    parts += [f'<h2>Score</h2><p>{escape(report.summary)}.</p><p class="soft">Took {report.seconds:.0f} s.', _LEGEND]
    return "\n".join([*parts, "</body></html>"]) + "\n"


_LEGEND = """Errors are in units in the last place (ulp) or in roundings, half a unit's worth, against exact arithmetic.
<i>Refused</i>: with a clear error about the argument. <i>Not promised</i>: an extra that does not hold. Neither is
scored. Each rounding convention is judged by itself.</p>"""


def _row(result: Result, meaning: str) -> str:
    mark, style = _MARKS[result.verdict], _CLASSES[result.verdict]
    said = f"<p>{escape(result.finding)}</p>" if result.finding and result.verdict != FAIL else ""
    return (
        f'<tr><td class="name">{escape(result.name)}{f"<p>{escape(meaning)}</p>" if meaning else ""}</td>'
        f'<td class="verdict {style}">{mark} {result.verdict}</td>'
        f'<td class="measured">{escape(result.measured)}{said}</td></tr>'
    )
