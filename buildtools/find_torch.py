"""Finds the PyTorch whose headers the build uses; CMakeLists.txt runs this, and backend.py imports it.

pip builds in an environment of its own, but with the interpreter of the environment that the package goes to. Asked in
isolation from what pip put into PYTHONPATH, that interpreter knows the torch which is installed there. Its headers are
all that a build needs, so a second one of several hundred megabytes need not be fetched.
"""

from __future__ import annotations

import subprocess
import sys

OLDEST = (2, 10)
_QUESTION = """
from importlib import metadata, util
spec = util.find_spec("torch")
if spec is not None and spec.submodule_search_locations:
    version = metadata.version("torch").split("+")[0].split(".")
    if tuple(map(int, version[:2])) >= {oldest}:
        print(spec.submodule_search_locations[0])
"""


def folder() -> str | None:
    """The folder of torch: the build environment's, else that of the interpreter's own environment; None if neither."""
    for options in ([], ["-I"]):
        command = [sys.executable, *options, "-c", _QUESTION.format(oldest=OLDEST)]
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        if found:
            return found
    return None


if __name__ == "__main__":
    at = folder()
    if at is None:
        sys.exit(f"the build needs torch {'.'.join(map(str, OLDEST))} or newer for its headers, and found none")
    print(at)
