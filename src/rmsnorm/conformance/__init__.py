"""A conformance suite for anybody's RMSNorm: `rmsnorm check` on the command line, docs/conformance.md for what it asks.

loading.py         from what a user types to an implementation; named.py has the known ones
calling.py         how a function, class or module is called, found by trying
implementation.py  what is checked, and what it raises
form.py            which RMSNorm it is: offset, eps and its place, rounding
exact.py           what is right
context.py         an implementation, run beside what is right
suite.py           the checks in order: accuracy.py, settings.py, inputs.py, gradients.py, invariance.py
outcome.py         a check and its result
"""

from rmsnorm.conformance.implementation import CannotCheck, Implementation
from rmsnorm.conformance.loading import load
from rmsnorm.conformance.outcome import Check, Result
from rmsnorm.conformance.suite import CHECKS, Expected, Score, chosen, run

__all__ = ["CHECKS", "CannotCheck", "Check", "Expected", "Implementation", "Result", "Score", "chosen", "load", "run"]
