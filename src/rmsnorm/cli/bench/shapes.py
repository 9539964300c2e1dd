"""The shapes people run norms on, by name, and what is to be timed on them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from rmsnorm.cli.requirements import shape

# The least that must be read and written, in tensors of the input's size: forward reads x and writes y; add reads x
# and the residual, and writes y and h; backward reads dy and x, and writes dx; training is forward and backward;
# quantized reads x, and writes a byte for each element and a float32 for each row.
TENSORS_MOVED = {"forward": 2, "add": 4, "backward": 3, "training": 5, "quantized": 1}
VECTORS_MOVED = {"forward": 1, "add": 1, "backward": 2, "training": 3, "quantized": 1}
WHATS = tuple(TENSORS_MOVED)
DEFAULT_WHATS = tuple(what for what in WHATS if what != "quantized")


@dataclass(frozen=True)
class Shape:
    """Rows and columns, and where they come from."""

    rows: int
    cols: int
    name: str = ""

    @property
    def size(self) -> str:
        return f"{self.rows}x{self.cols}"

    def __str__(self) -> str:
        return f"{self.name} {self.size}".strip()


@dataclass(frozen=True)
class Case:
    """One contest: everything its contestants have in common."""

    what: str
    shape: Shape
    dtype: str
    device: str
    threads: int

    @property
    def numel(self) -> int:
        return self.shape.rows * self.shape.cols

    def bytes_moved(self, itemsize: int) -> int:
        """Return the least that it must read and write."""
        vectors = VECTORS_MOVED[self.what] * self.shape.cols
        quantized = self.numel + 4 * self.shape.rows if self.what == "quantized" else 0
        return (TENSORS_MOVED[self.what] * self.numel + vectors) * itemsize + quantized

    def __str__(self) -> str:
        return f"{self.what} {self.shape} {self.dtype}"


NAMED = (
    Shape(1, 4096, "llama3-8b decode"),
    Shape(8, 4096, "llama3-8b batch-8"),
    Shape(1024, 384, "small-lm train"),
    Shape(2048, 768, "gpt2-size train"),
    Shape(2048, 4096, "llama3-8b prefill"),
    Shape(8192, 4096, "llama3-8b train"),
    # 2048 tokens of 32 heads, as in Qwen3-8B.
    Shape(65536, 128, "qk-norm"),
)
DEFAULT = tuple(shape for shape in NAMED if shape.size in ("1x4096", "1024x384", "2048x4096", "65536x128"))
QUICK = tuple(shape for shape in NAMED if shape.size in ("8x4096", "1024x384", "2048x768"))


def parse(text: str) -> tuple[Shape, ...]:
    """Convert an argument to shapes, for argparse: `all`, a part of a name, or ROWSxCOLS."""
    if text == "all":
        return NAMED
    if found := tuple(named for named in NAMED if text and (text in named.name or text == named.size)):
        return found
    try:
        return (Shape(*shape(text)),)
    except argparse.ArgumentTypeError:
        names = ", ".join(named.name for named in NAMED)
        raise argparse.ArgumentTypeError(
            f"takes ROWSxCOLS, all, or a part of one of these names: {names}; got {text!r}"
        ) from None
