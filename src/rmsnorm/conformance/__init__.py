"""A conformance suite for anybody's RMSNorm: `rmsnorm check` on the command line, docs/conformance.md for what it asks.

loading.py    from what a user types to a subject; named.py has the known ones
calling.py    how a function, class or module is called, found by trying
subject.py    what is checked
form.py       which RMSNorm it is: offset, eps and its place, rounding
exact.py      what is right
trial.py      a subject, run beside what is right
suite.py      the checks in order: accuracy.py, settings.py, inputs.py, gradients.py, invariance.py
verdicts.py   a check and its result
"""

from rmsnorm.conformance.loading import load
from rmsnorm.conformance.subject import CannotCheck, Subject
from rmsnorm.conformance.suite import CHECKS, Expected, Score, chosen, run
from rmsnorm.conformance.verdicts import Check, Result

__all__ = ["CHECKS", "CannotCheck", "Check", "Expected", "Result", "Score", "Subject", "chosen", "load", "run"]
