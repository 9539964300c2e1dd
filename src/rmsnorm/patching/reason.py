"""The exception that carries why a module is left alone."""

from __future__ import annotations

from typing import Any


class NotRMSNorm(Exception):
    """Why a module is left alone.

    Args:
        reason: in words, after the module's name.
        normalises: whether it is a norm of another kind, which a report mentions.
        convention: what it computes now, where it is known and only cannot be relied on.
    """

    def __init__(self, reason: str, normalises: bool = False, convention: Any = None) -> None:
        super().__init__(reason)
        self.normalises, self.convention = normalises, convention


class OtherDimensions(NotRMSNorm):
    """It may be one of the channels of images."""
