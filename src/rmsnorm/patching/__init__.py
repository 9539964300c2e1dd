"""Recognises every RMSNorm in a model by what it computes, and puts this library's kernels in its place.

convention.py   what was found, in words and as the call that computes it
specimen.py     runs a module on tensors of our choosing without touching it
probes.py       which inputs tell the forms apart: eps, offset, groups, gate
reasons.py      why it is none
surroundings.py what is set around it
state.py        what a forward may write to: found, compared, put back
outward.py      calls that nothing could put back, refused before they happen
proof.py        which rounding it is, and the order of what has to hold
samples.py      random rows for it; judging.py: how far results may be apart
magnitudes.py   rows, weights and gates of every size
gradients.py    in every pair of dtypes; trials.py: modes, autocast, dimensions, strides
identifying.py  the two together: identify
dependencies.py what a forward depends on beside its inputs
watching.py     whether that is as it was
layout.py       how results lie in memory
patched.py      the class of a patched module, which decides in each call
survey.py       every module of a model, examined
replacing.py    patch and unpatch
report.py       what patch tells
"""

from rmsnorm.patching.convention import Convention
from rmsnorm.patching.identifying import identify
from rmsnorm.patching.replacing import patch, unpatch
from rmsnorm.patching.report import Report

__all__ = ["Convention", "Report", "identify", "patch", "unpatch"]
