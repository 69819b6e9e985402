"""The texts that a model reads: files as they are, or prompts of a JSON Lines file."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqtool.errors import InputError
from tqtool.escapes import parser_reason
from tqtool.files import STREAM

LEAST_TOKENS = 16  # fewer say nothing about a cache


@dataclass(frozen=True, slots=True)
class Text:
    """One text and the name of the folder that its dump gets where there are several."""

    name: str
    source: str  # the file, with the line of a prompt
    content: str | tuple[dict[str, Any], ...]  # messages of a chat are put in the model's own form

    @property
    def sha256(self) -> str:
        """The digest of the text's UTF-8 bytes; of messages, of their JSON with sorted keys."""
        text = self.content if isinstance(self.content, str) else json.dumps(self.content, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def read_texts(files: Sequence[str], prompts: str | None) -> tuple[Text, ...]:
    """Read text files (`-`: standard input) and the prompts of a JSON Lines file; names that are alike are told apart.

    Raises: `InputError` for files that cannot be read, are not UTF-8 or hold no text.
    """
    texts = [Text("stdin" if path == STREAM else _plain(Path(path).stem), path, _content(path)) for path in files]
    if prompts is not None:
        texts += _prompts(prompts)
    counts: dict[str, int] = {}
    named = []
    for text in texts:
        seen = counts[text.name] = counts.get(text.name, 0) + 1
        named.append(Text(text.name if seen == 1 else f"{text.name}-{seen}", text.source, text.content))
    return tuple(named)


def token_ids(tokenizer: Any, text: Text, limit: int) -> tuple[list[int], int]:
    """Return at most `limit` token ids of the text as the model's own tokenizer makes them, and how many there were.

    Raises: `InputError`, code `text`, for fewer than LEAST_TOKENS and for a chat that the tokenizer has no form for.
    """
    if isinstance(text.content, str):
        ids = tokenizer(text.content, verbose=False)["input_ids"]
    else:
        try:
            shown = tokenizer.apply_chat_template(list(text.content), tokenize=False)
        except Exception as error:  # templates are programs of the model's maker
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"{text.source}: no chat form: {reason}", code="text", path=text.source) from error
        ids = tokenizer(shown, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < LEAST_TOKENS:
        found = f"{len(ids)} token{'s' * (len(ids) != 1)}"
        hint = "a thousand tokens or more of what your users write make a dump worth measuring"
        message = f"{text.source}: {found}, at least {LEAST_TOKENS} are needed"
        raise InputError(message, code="text", hint=hint, path=text.source)
    return list(ids[:limit]), len(ids)


def _content(path: str) -> str:
    try:
        read = sys.stdin.buffer.read if path == STREAM else Path(path).read_bytes
        return read().decode("utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file", code="not-found", path=path) from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a directory", code="is-directory", path=path) from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8", code="text", path=path) from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", code="unreadable", path=path) from None


def _prompts(path: str) -> list[Text]:
    texts = []
    for number, line in enumerate(_content(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: not JSON: {parser_reason(error)}", code="text", path=path) from None
        texts.append(_prompt(found, where, f"{_plain(Path(path).stem)}-{number:04d}", path))
    if not texts:
        raise InputError(f"{path}: holds no prompts", code="text", path=path)
    return texts


def _prompt(found: Any, where: str, name: str, path: str) -> Text:
    if isinstance(found, str):
        found = {"text": found}
    given = [key for key in ("text", "prompt", "messages") if isinstance(found, dict) and key in found]
    if len(given) != 1:
        hint = 'for instance {"text": "Once upon a time"}'
        raise InputError(f"{where}: need one of text, prompt, messages", code="text", hint=hint, path=path)
    content = found[given[0]]
    if given[0] == "messages":
        if not isinstance(content, list) or not content or not all(isinstance(each, dict) for each in content):
            raise InputError(f"{where}: messages is no list of objects", code="text", path=path)
        content = tuple(content)
    elif not isinstance(content, str):
        raise InputError(f"{where}: {given[0]} is no string", code="text", path=path)
    return Text(_plain(str(found["id"])) if "id" in found else name, where, content)


def _plain(name: str) -> str:
    """Return a name that is a file's anywhere: letters, digits, dot, dash and underscore."""
    return re.sub(r"[^\w.\-]+", "-", name).strip(".-")[:100] or "text"
