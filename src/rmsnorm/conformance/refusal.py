"""What an exception of an implementation is: a refusal, which is fair, or an accident, which is a fault.

A refusal is a clear error about the argument: with a message that names what is not taken, and of no type that stands
for an accident. An IndexError, an assertion without a word, or what PyTorch says of an operation somewhere inside (a
view that does not fit) tells a user nothing about the call.
"""

from __future__ import annotations

import re

_ACCIDENTAL = (
    LookupError,
    AttributeError,
    ArithmeticError,
    NameError,
    MemoryError,
    RecursionError,
    OSError,
    ImportError,
    StopIteration,
    SystemExit,
)
# What an argument has: its dtype, its shape, its layout, its device, its gradient.
_NAMED = re.compile(
    r"(?<![a-z])("
    r"d?types?|scalar ?types?|half|double|b?float\d*|bf16|fp\d+|\d+.?bits?|precision"
    r"|(normalized_)?shapes?|n?dims?|dimension\w*|rank|\d-?d|widths?|hidden\w*|cols?|columns?|rows?|sizes?|features?"
    r"|elements?|lengths?|multiples?|divisible|powers? of|contiguous|strides?|strided|layouts?|align\w*"
    r"|devices?|backends?|cpu|grad\w*|backward|autograd"
    r")(?![a-z])",
    re.IGNORECASE,
)
# Python and PyTorch, of an operation inside: the implementation did not look at its argument.
_ACCIDENTS = re.compile(
    r"is invalid for input of size|must match the (existing )?size|view size is not compatible|cannot be multiplied"
    r"|out of (bounds|range|memory)|can't allocate memory|values to unpack|cannot unpack|unsupported operand"
    r"|can only concatenate"
    r"|object (is not|has no|cannot|does not)|NoneType|unexpected keyword|positional argument|required .*argument"
    r"|illegal|misaligned|CUDA error|INTERNAL ASSERT|is not defined|referenced before|must be real number",
    re.IGNORECASE,
)


def is_refusal(error: BaseException) -> bool:
    """Whether the exception says which argument is not taken."""
    message = str(error)
    return (
        not isinstance(error, _ACCIDENTAL) and _NAMED.search(message) is not None and _ACCIDENTS.search(message) is None
    )
