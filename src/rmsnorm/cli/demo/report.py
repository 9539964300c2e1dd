"""What the demo found, as tables on the terminal."""

import sys
from dataclasses import dataclass
from typing import Any

import torch

from rmsnorm.benchmarking.timing import Timing
from rmsnorm.cli.demo.bits import Bits
from rmsnorm.cli.demo.measure import Result


@dataclass(frozen=True)
class Demonstration:
    """The model, what its norms are, and what was found in each dtype."""

    model: str
    norms: list[dict[str, Any]]
    threads: int
    prefill: int
    decode: int
    rounds: int
    results: list[Result]
    bits: list[Bits]
    findings: list[str]
    seconds: float


def show(demonstration: Demonstration) -> None:
    """Print everything; texts and tables are for people, `--json` is for programs."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    count = sum(group["count"] for group in demonstration.norms)
    console.print(
        f"\n[bold]{demonstration.model}[/bold]: {count} norms, each replaced by ours with the same Parameter\n"
    )
    console.print(_norms(demonstration.norms))
    for result in demonstration.results:
        console.rule(result.dtype)
        console.print(_texts(result))
        console.print(_differences(result))
        console.print(_times(result, demonstration))
    console.rule("bits")
    console.print(_bits(demonstration.bits))
    _verdict(console, demonstration)


def _table(title: str, *columns: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column)
    return table


def _norms(norms: list[dict[str, Any]]) -> Any:
    columns = "name", "count", "class", "width", "eps", "dtype", "rounding"
    table = _table("", *columns)
    for group in norms:
        table.add_row(*(f"{group[column]:.3g}" if column == "eps" else str(group[column]) for column in columns))
    return table


def _texts(result: Result) -> Any:
    from rich.markup import escape

    table = _table("Greedy text", "prompt", "before (transformers)", "after (rmsnorm)", "identical")
    for text in result.texts:
        identical = "yes" if text.gap is None else f"[bold]no[/bold], after {text.common} tokens; gap {text.gap:.3g}"
        table.add_row(text.prompt, escape(text.before), escape(text.after), identical)
        table.add_section()
    return table


def _differences(result: Result) -> Any:
    outputs, logits = result.norm_outputs, result.logits
    table = _table("What changes", "", "")
    table.show_header = False
    table.add_row("norm outputs that change, given the same inputs", f"{outputs.changed:,} of {outputs.total:,}")
    table.add_row(
        "... that are not the exact formula's", f"before {outputs.inexact_before:,}, after {outputs.inexact_after:,}"
    )
    table.add_row(
        "largest logit difference", f"{logits.largest:.3g}, which is {logits.relative:.2g} of the largest logit"
    )
    table.add_row("... when one bit of one norm output changes, before", f"{logits.one_bit:.3g}")
    table.add_row("positions with the same first choice", f"{logits.same_choice} of {logits.positions}")
    table.caption = (
        f"One last bit of a {result.dtype} number is {torch.finfo(getattr(torch, result.dtype)).eps:.1g} of it, and "
        f"every layer carries it on: a single bit changed in the model's own first norm moves its logits by up to "
        f"{logits.one_bit:.3g}, all norms replaced move them by up to {logits.largest:.3g}. "
    )
    if all(text.identical for text in result.texts):
        table.caption += "Where two tokens are closer than one bit moves them, either may come first."
    else:
        table.caption += (
            "A text differs where the model was undecided: the gap between its logits for the two tokens is so small "
            "that one bit decides. It goes on from another word; neither text is the wrong one."
        )
    table.caption_justify = "left"
    return table


def _bits(bits: list[Bits]) -> Any:
    columns = [f"{found.dtype}, {which}" for found in bits for which in ("before", "after")]
    table = _table("A hash of all norms' results on the same hidden states of the model", "", *columns)
    for condition in bits[0].after:
        table.add_row(
            condition, *(text for found in bits for text in (found.before[condition], found.after[condition]))
        )
    answers = [f"{found.dtype} {len(set(found.before.values()))}" for found in bits]
    table.caption = (
        f"{bits[0].rows} rows at each norm. After, one answer everywhere; before, this many: {', '.join(answers)}. "
        "The matrix products between the norms are PyTorch's and promise no bits, so the rows are held fixed."
    )
    table.caption_justify = "left"
    return table


def _times(result: Result, demonstration: Demonstration) -> Any:
    table = _table(
        f"Time: medians and quartiles of {demonstration.rounds} rounds, {demonstration.threads} threads",
        "",
        "before",
        "after",
        "after / before",
    )
    prefill, decode = result.times["prefill"], result.times["decode"]
    labels = {
        f"prefill of {demonstration.prefill} tokens": prefill,
        f"decoding {demonstration.decode} tokens": decode,
    }
    for label, times in labels.items():
        before, after = times["before"], times["after"]
        for name, old, new in (("norms", before.norms, after.norms), ("whole model", before.whole, after.whole)):
            ratio = f"{new.median / old.median:.2f}"
            table.add_row(f"{label}, {name}", _milliseconds(old), _milliseconds(new), ratio)
    table.caption = (
        f"Norms: {prefill['after'].norm_calls} calls in the prefill, {decode['after'].norm_calls} in decoding, timed "
        f"by hooks; the {result.stopwatch_overhead * 1e6:.2f} us a call that the hooks add are subtracted."
    )
    table.caption_justify = "left"
    return table


def _milliseconds(timing: Timing) -> str:
    return f"{timing.median * 1e3:.1f} ms ({timing.low * 1e3:.1f} to {timing.high * 1e3:.1f})"


def _verdict(console: Any, demonstration: Demonstration) -> None:
    texts = [text for result in demonstration.results for text in result.texts]
    same = sum(text.identical for text in texts)
    console.print(f"{same} of {len(texts)} texts are identical, token for token. Took {demonstration.seconds:.0f} s.")
    for finding in demonstration.findings:
        console.print(f"[bold red]Finding:[/bold red] {finding}", soft_wrap=True)
