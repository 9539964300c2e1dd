"""A conformance suite for anybody's RMSNorm: `rmsnorm check` on the command line, docs/conformance.md for what it asks.

loading.py         from what a user types to an implementation; named.py has the known ones, kernels.py those of others
calling.py         how a function, class or module is called, found by trying; styles.py, modules.py
implementation.py  what is checked, and what it raises
form.py            which RMSNorm it is: offset, eps and its place, rounding
exact.py           what is right
context.py         an implementation, run beside what is right
suite.py           the checks in order: accuracy.py, settings.py, inputs.py, sizes.py, gradients.py, graph.py,
                   calls.py, memory.py, invariance.py; with what stands around a norm residual.py, gated.py, groups.py;
                   and quantized.py
examination.py     all of it together; process.py and worker.py: in a process of its own
refusal.py         which exceptions are fair
outcome.py         a check and its result
"""

from rmsnorm.conformance.examination import About, Request, examine, output_to_stderr
from rmsnorm.conformance.implementation import CannotCheck, Implementation
from rmsnorm.conformance.loading import load
from rmsnorm.conformance.outcome import Check, Result
from rmsnorm.conformance.process import examine_apart
from rmsnorm.conformance.suite import CHECKS, Expected, Score, chosen, run

__all__ = [
    "CHECKS",
    "About",
    "CannotCheck",
    "Check",
    "Expected",
    "Implementation",
    "Request",
    "Result",
    "Score",
    "chosen",
    "examine",
    "examine_apart",
    "load",
    "output_to_stderr",
    "run",
]
