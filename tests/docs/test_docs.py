"""The examples of the guides run as they stand, each guide from its first line to its last."""

import logging
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("guide", ["compile", "distributed", "export"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of onnxscript's imports
def test_examples_run(guide):
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / f"{guide}.md").read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    namespace = {}
    logging.disable(logging.WARNING)
    try:
        for block in blocks:
            exec(compile(block, f"{guide}.md", "exec"), namespace)  # noqa: S102 - the example is ours
    finally:
        logging.disable(logging.NOTSET)
