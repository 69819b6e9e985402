"""`tqtool capture` where it needs no model: options, texts, and the extra that is not installed."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tqtool.cli.capture import parse_layers
from tqtool.errors import InputError, SetupError, UsageError
from tqtool.hf import extra
from tqtool.hf.capture_texts import Text, read_texts
from tqtool.rendering.answers.capture import dump_text, spans

Run = Callable[..., Any]
WITHOUT_EXTRA = extra.version_of("torch") is None


@pytest.mark.skipif(not WITHOUT_EXTRA, reason="torch is installed here; the ordinary test environment has none")
def test_without_the_extra_one_line_says_how_to_install_it(tqtool: Run, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    done = tqtool("capture", "model", "--text", "a.txt", "-o", "dump")
    assert done.returncode == 6
    assert done.stderr.startswith("tqtool: error[extra]: this needs torch and transformers")
    assert done.stderr.splitlines()[1:] == ["  hint: pip install 'tqtool[hf]'"]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({}, "this needs torch and transformers and tokenizers, not installed here"),
        ({"torch": "2.13.0", "tokenizers": "1"}, "this needs transformers, not installed here"),
        (
            {"torch": "2.13.0", "tokenizers": "1", "transformers": "4.57.1"},
            "transformers 4.57.1 is installed, 5.0 or later is needed",
        ),
    ],
)
def test_what_is_missing_of_the_extra_is_named(
    found: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extra, "version_of", found.get)
    with pytest.raises(SetupError) as caught:
        extra.require_extra()
    assert (caught.value.code, str(caught.value)) == ("extra", message)
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("pip install 'tqtool[hf]'")


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["model", "-o", "d"], "no text given", "say --text FILE or --prompts FILE.jsonl"),
        (["model", "a.txt", "-o", "d"], "a.txt: is this a text? say --text a.txt", None),
        (["model", "--text", "a.txt"], "-o is missing: the folder of the dump", "for instance -o dump/"),
    ],
)
def test_options_that_do_not_say_what_to_do(tqtool: Run, arguments: list[str], message: str, hint: str | None) -> None:
    done = tqtool("capture", *arguments)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"tqtool: error[usage]: {message}", *([f"  hint: {hint}"] if hint else [])]


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("all", None),
        ("0", (0,)),
        ("-1", (7,)),
        ("0,1,-1", (0, 1, 7)),
        ("2-4", (2, 3, 4)),
        ("-2-7, 0", (0, 6, 7)),
        ("3,3", (3,)),
    ],
)
def test_layers_are_read(text: str, layers: tuple[int, ...] | None) -> None:
    assert parse_layers(text, 8) == layers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8", "--layers '8': there are layers 0 to 7"),
        ("-9", "--layers '-9': there are layers 0 to 7"),
        ("4-2", "--layers '4-2': there are layers 0 to 7"),
        ("first", "--layers 'first': need all, a number, -1 or a range as 3-5"),
        ("1.5", "--layers '1.5': need all, a number, -1 or a range as 3-5"),
        ("", "--layers names no layer"),
        (" , ", "--layers names no layer"),
    ],
)
def test_layers_that_are_none_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_layers(text, 8)
    assert str(caught.value) == message


def test_files_and_prompts_are_read_in_order_and_named_apart(tmp_path: Path) -> None:
    (tmp_path / "a b.txt").write_bytes(b"\xef\xbb\xbfone\r\n")  # a byte-order mark is no text
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "a b.txt").write_text("two")
    lines = ['{"text": "three"}', "", '"four"', '{"prompt": "five", "id": "../five"}']
    lines.append('{"messages": [{"role": "user", "content": "six"}]}')
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    texts = read_texts([str(tmp_path / "a b.txt"), str(tmp_path / "x" / "a b.txt")], str(tmp_path / "p.jsonl"))
    assert [text.name for text in texts] == ["a-b", "a-b-2", "p-0001", "p-0003", "five", "p-0005"]
    assert [text.content for text in texts[:5]] == ["one\r\n", "two", "three", "four", "five"]
    assert texts[5].content == ({"role": "user", "content": "six"},)
    assert texts[2].source == f"{tmp_path / 'p.jsonl'}:1"


def test_a_text_comes_from_standard_input_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("Zoë\n".encode())))
    assert read_texts(["-"], None) == (Text("stdin", "-", "Zoë\n"),)


def test_a_text_is_told_by_its_bytes() -> None:
    assert Text("a", "a", "Zoë").sha256 == hashlib.sha256("Zoë".encode()).hexdigest()
    first, second = ({"role": "user", "content": "x"},), ({"content": "x", "role": "user"},)
    assert Text("a", "a", first).sha256 == Text("a", "a", second).sha256


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "p.jsonl:1: not JSON: "),
        ("[" * 100000, "p.jsonl:1: not JSON: nested too deeply"),
        ("3", "p.jsonl:1: need one of text, prompt, messages"),
        ("{}", "p.jsonl:1: need one of text, prompt, messages"),
        ('{"text": "a", "prompt": "b"}', "p.jsonl:1: need one of text, prompt, messages"),
        ('{"text": 3}', "p.jsonl:1: text is no string"),
        ('{"messages": []}', "p.jsonl:1: messages is no list of objects"),
        ('{"messages": ["hi"]}', "p.jsonl:1: messages is no list of objects"),
        ("\n\n", "p.jsonl: holds no prompts"),
    ],
)
def test_prompts_that_are_none_are_refused(
    line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text(line)
    with pytest.raises(InputError) as caught:
        read_texts([], "p.jsonl")
    assert caught.value.code == "text"
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (None, "not-found", "t.txt: no such file"),
        ("folder", "is-directory", "t.txt: is a directory"),
        (b"ab\xff", "text", "t.txt: byte 2 is not UTF-8"),
    ],
)
def test_files_that_are_no_text_are_refused(
    content: Any, code: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if content == "folder":
        Path("t.txt").mkdir()
    elif content is not None:
        Path("t.txt").write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_texts(["t.txt"], None)
    assert (caught.value.code, str(caught.value)) == (code, message)


@pytest.mark.parametrize(
    ("numbers", "text"), [([0], "0"), ([0, 1, 2], "0-2"), ([0, 2, 3, 9], "0, 2-3, 9"), ([5, 7], "5, 7")]
)
def test_spans(numbers: list[int], text: str) -> None:
    assert spans(numbers) == text


def test_what_was_captured_is_told_layer_by_layer() -> None:
    plain = {"window": None, "chunk": None, "softcap": None, "sinks": None, "score_bias": None}
    plain |= {"heads": 32, "kv_heads": 8, "key_dim": 128, "value_dim": 128, "scaling": 128**-0.5}
    layers = [
        plain | {"layer": 0, "kind": "sliding", "window": 4096, "softcap": 50.0, "files": {"k": "k.npy"}},
        plain | {"layer": 1, "kind": "full", "sinks": [0.5] * 32, "value_dim": 64, "files": {"k": "k.npy"}},
        plain | {"layer": 2, "kind": "full", "files": {}},
        plain | {"layer": 3, "kind": "linear", "files": {}},
        plain | {"layer": 4, "kind": "linear", "files": {}},
        plain | {"layer": 5, "kind": "full", "score_bias": "mask", "files": {"k": "k.npy"}},
    ]
    manifest = {"layers": layers, "tokens": 8192, "query_tail": 256}
    assert dump_text("d", manifest, 3 << 20, planned=True).splitlines() == [
        "d: 3 of 6 layers, 8,192 tokens, queries of the last 256, 3 MiB would be written",
        "  layer 0: sliding, window 4096: 32 query / 8 KV heads of 128, scale 0.08839, soft cap 50",
        "  layer 1: full: 32 query / 8 KV heads of 128 (values 64), scale 0.08839, sinks",
        "  layer 5: full: 32 query / 8 KV heads of 128, scale 0.08839",
        "  not captured: layer 2: not asked for",
        "  not captured: layers 3-4: no keys and values (linear attention, state space or convolution)",
        "  not measurable: layer 5: the mask is neither causal nor a window or chunk",
    ]
    assert json.loads(json.dumps(manifest)) == manifest
