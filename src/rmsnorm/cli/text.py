"""Text that comes from others (names in files, paths, messages of exceptions), made fit to be shown."""

LONGEST = 300


def printable(text: str, longest: int = LONGEST) -> str:
    r"""The text in one line: what would steer a terminal, break the line or not be seen at all stands as its escape.

    >>> printable("norm.\x1b[2Jweight\n")
    'norm.\\x1b[2Jweight\\n'
    """
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: longest + 1])
    return shown if len(shown) <= longest else f"{shown[:longest]}..."
