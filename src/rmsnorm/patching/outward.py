"""Calls out of a forward that no snapshot could put back: to print, to log, to write files, to set the environment."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rmsnorm.patching.reason import NotRMSNorm

_WRITING = {
    *("print", "open", "open_code", "write", "writelines", "putenv", "unsetenv", "send", "sendall", "sendto", "system"),
    *("mkdir", "rmdir", "remove", "unlink", "rename", "replace", "truncate"),
}
_MODULES = {"builtins", "io", "_io", "posix", "nt", "_socket"}
# Compilers write their caches; what they compile is looked at by its results.
_COMPILERS = {"torch", "triton"}
_LOGGING = logging.Logger._log.__code__


@contextmanager
def no_outward_calls() -> Iterator[None]:
    """Inside, in this thread, such a call raises NotRMSNorm before it does anything; a running profiler has its way."""
    if sys.getprofile() is not None:
        yield
        return
    sys.setprofile(_refuse)
    try:
        yield
    finally:
        sys.setprofile(None)


def _refuse(frame: FrameType, event: str, arg: Any) -> None:
    if event == "call":
        if frame.f_code is _LOGGING and not _compiles(frame):
            raise NotRMSNorm("it logs as it runs", True)
    elif event == "c_call" and arg.__name__ in _WRITING and _module(arg) in _MODULES and not _compiles(frame):
        raise NotRMSNorm(f"it calls {arg.__name__}() as it runs", True)


def _module(function: Any) -> str:
    if isinstance(function.__self__, io.IOBase):
        return "io"
    return str(getattr(function, "__module__", None) or type(function.__self__).__module__)


def _compiles(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_globals.get("__name__") != "rmsnorm.patching.specimen":
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _COMPILERS:
            return True
        frame = frame.f_back
    return False
