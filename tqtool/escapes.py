"""Text that somebody else wrote (names of files and tensors, words of a damaged file) as one harmless printed line."""

from __future__ import annotations

import re

# Controls, what turns the direction of writing, line separators, bytes that are no UTF-8 (PEP 383).
_ACTING = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
_COLOR = re.compile("(\x1b\\[[0-9;]*m)")  # of our own tables


def visible(text: str, *, keep: str = "") -> str:
    r"""Return the text with every character that would act on a terminal spelled out: `\n`, `\u001b`.

    The spelling is that of JSON, so a JSON text stays the same document.
    """
    return _ACTING.sub(lambda found: found[0] if found[0] in keep else _spelled(found[0]), text)


def visible_page(text: str, *, color: bool) -> str:
    """Return a text of many lines, tabs and (with `color`) colours with all else spelled out."""
    parts = _COLOR.split(text) if color else [text]
    return "".join(part if i % 2 else visible(part, keep="\n\t") for i, part in enumerate(parts))


def _spelled(letter: str) -> str:
    return {"\n": r"\n", "\t": r"\t", "\r": r"\r"}.get(letter, f"\\u{ord(letter):04x}")


def sayable(text: str) -> str:
    r"""Return the text with bytes that are not UTF-8, which names of files may hold, spelled out: `caf\xe9`.

    Such a text can be written to any file; `visible` would still spell out what acts on a terminal.
    """
    return text if text.isascii() else _raw(text).decode("utf-8", "backslashreplace")


def _raw(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half a surrogate pair that stands for no byte
        return text.encode("utf-8", "backslashreplace")


def parser_reason(error: Exception) -> str:
    """Return why JSON or TOML of a file cannot be read, without the words Python has for its programmers."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    text = " ".join(str(error).split())
    return "a number of thousands of digits" if "int_max_str_digits" in text else text[:120]
