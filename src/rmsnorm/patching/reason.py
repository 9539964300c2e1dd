"""The exception that carries why a module is left alone."""

from __future__ import annotations


class NotRMSNorm(Exception):
    """Why a module is left alone; `normalises` says whether it is a norm of another kind, which a report mentions."""

    def __init__(self, reason: str, normalises: bool = False) -> None:
        super().__init__(reason)
        self.normalises = normalises
