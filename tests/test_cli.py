"""The command line's frame: global options, exit statuses, where errors become lines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import Run
from loops import case

import tqtool as package
from tqtool.cli.app import COMMANDS, hoist_global_options
from tqtool.cli.signals import STOPPING
from tqtool.escapes import visible, visible_page


def test_version_and_help_answer_on_stdout(tqtool: Run) -> None:
    assert tqtool("--version").stdout == f"tqtool {package.__version__}\n"
    assert tqtool("-V").returncode == 0
    assert "Commands:" in tqtool("-h").stdout
    assert tqtool("size", "-h").returncode == 0


def test_help_is_quick(tqtool: Run) -> None:
    begun = time.perf_counter()
    tqtool("--help")
    assert time.perf_counter() - begun < 3  # 0.1 s; only a heavy import would come near


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["size", "-q", "--tokens", "3"], ["-q", "size", "--tokens", "3"]),
        (["size", "--threads", "2"], ["--threads", "2", "size"]),
        (["size", "--threads=2", "-vv"], ["--threads=2", "-vv", "size"]),
        (["size", "--", "-q"], ["size", "--", "-q"]),
        (["size", "--threads"], ["--threads", "size"]),
    ],
)
def test_global_options_may_stand_anywhere(given: list[str], expected: list[str]) -> None:
    assert hoist_global_options(given) == expected


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["siz"], "tqtool: error[usage]: No such command 'siz'. Did you mean 'size'?"),
        (["size", "--tokenz", "3"], "tqtool: error[usage]: No such option: --tokenz"),
        (["size", "--tokens"], "tqtool: error[usage]: Option '--tokens' requires"),
        (["--threads", "0", "size"], "tqtool: error[usage]: Invalid value for '--threads'"),
        (["--color", "maybe", "size"], "tqtool: error[usage]: Invalid value for '--color'"),
        (["size", "extra"], "tqtool: error[usage]: Got unexpected extra argument"),
    ],
)
def test_usage_errors_are_one_line_and_status_2(tqtool: Run, arguments: list[str], line: str) -> None:
    result = tqtool(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith(line)
    told = f"tqtool {arguments[0]} --help lists its arguments and options"
    assert result.stderr.splitlines()[1:] == [
        f"  hint: {told if arguments[0] == 'size' else 'tqtool --help lists the commands'}"
    ]


def test_json_carries_the_error_too(tqtool: Run) -> None:
    result = tqtool("size", "--model", "absent.json", "--json")
    assert json.loads(result.stdout) == {
        "schema": "tqtool.error/1",
        "code": "not-found",
        "exit": 3,
        "message": "absent.json: no such file",
        "hint": None,
        "path": "absent.json",
    }


@pytest.mark.parametrize("command", ["compress", "validate", "inspect"])
def test_an_unknown_type_is_refused_by_every_command_that_takes_one(tqtool: Run, command: str) -> None:
    result = tqtool(command, "dump", "--dtype", "nonsense")
    assert result.returncode == 2
    assert "error[usage]: Invalid value for '--dtype': Value error, 'nonsense' is not one of 'bf16'" in result.stderr


@pytest.mark.parametrize("arguments", [[], *([command.__name__.replace("_", "-")] for command, _ in COMMANDS)])
def test_help_does_not_live_on_docstrings(tqtool: Run, arguments: list[str]) -> None:
    plain, stripped = (
        tqtool(*arguments, "--help", env=os.environ | {"PYTHONOPTIMIZE": level}).stdout for level in ("0", "2")
    )
    assert plain
    assert stripped == plain


@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [
        (["compress", "layer00_k.npy"], (3, 4), "error["),
        (["gen-codebooks"], (4,), "error[write]: outputs: the folder above it does not exist"),
        (["export-c", "out"], (4,), "error[write]: out: the folder above it does not exist"),
        (["validate", "--json-out", "r.json"], (4,), "error[write]: r.json: "),
        (["report", "r.json"], (3,), "error[not-found]: r.json: no such file"),
    ],
)
def test_a_folder_that_is_gone_is_told_in_a_line(
    tmp_path: Path, arguments: list[str], status: tuple[int, ...], line: str
) -> None:
    words = ["sh", "-c", 'mkdir gone && cd gone && rmdir ../gone && exec "$@"', "sh"]
    done = subprocess.run(
        [*words, sys.executable, "-I", "-m", "tqtool", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in status, done.stderr
    assert line in done.stderr


def test_twice_verbose_shows_the_traceback(tqtool: Run) -> None:
    assert "Traceback" not in tqtool("size", "--model", "absent.json", "-v").stderr
    assert "Traceback" in tqtool("size", "--model", "absent.json", "-vv").stderr


@pytest.fixture
def handlers() -> Iterator[None]:
    """`main` sets signal handlers: afterwards they are those of the tests again."""
    numbers = (signal.SIGPIPE, *STOPPING)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_a_bug_is_reported_as_such(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from tqtool.cli import app

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("seven")

    monkeypatch.setattr(app, "app", broken)
    monkeypatch.setattr(sys, "argv", ["tqtool", "size"])
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert ended.value.code == 70
    assert "error[bug]: ZeroDivisionError('seven'); please report it" in capsys.readouterr().err


@pytest.mark.usefixtures("handlers")
def test_ctrl_c_is_status_130_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tqtool.cli import app

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "app", interrupted)
    monkeypatch.setattr(sys, "argv", ["tqtool", "size"])
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err.startswith("tqtool: error[interrupted]: ")


def test_a_closed_pipe_ends_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [sys.executable, "-m", "tqtool", "size"], stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert process.returncode == -signal.SIGPIPE
    assert process.stderr == b""


def test_tables_off_a_terminal_are_plain(tqtool: Run) -> None:
    text = tqtool("size").stdout
    assert text.isascii()
    assert "\x1b" not in text
    assert "\x1b" not in tqtool("siz").stderr
    assert "\x1b[31m" in tqtool("size", "-c", "k4", "--color", "always").stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")  # noqa: PTH110
@pytest.mark.parametrize("arguments", [["size"], ["size", "--json"], ["--version"], ["--help"]])
def test_a_full_disk_behind_stdout_is_an_output_error(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        command = [sys.executable, "-m", "tqtool", *arguments]
        process = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert process.returncode == 4
    assert process.stderr == "tqtool: error[write]: standard output: No space left on device\n"


def test_a_table_without_colour_has_no_escapes() -> None:
    from tqtool.rendering.tables import Column, table_text

    text = table_text([Column("a"), Column("b")], [["1", "[bold]2"]], terminal=True, width=40, color=False)
    assert "\x1b" not in text
    assert "[bold]2" in text
    assert "\x1b" in table_text([Column("a")], [["1"]], terminal=True, width=40, color=True)


def closing(redirections: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = f'exec "$@" {redirections}'
    words = ["sh", "-c", command, "sh", sys.executable, "-m", "tqtool", *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [["size"], ["--version"], ["--help"], []])
def test_a_closed_stdout_is_an_output_error(arguments: list[str]) -> None:
    run = closing(">&-", *arguments)
    assert run.returncode == 4
    assert run.stderr == "tqtool: error[write]: standard output: Bad file descriptor\n"


def test_a_closed_stderr_keeps_nobody_from_the_work(tmp_path: Path) -> None:
    np.save(tmp_path / "kv.npy", np.zeros((2, 64), np.float32))
    run = closing("2>&-", "compress", str(tmp_path / "kv.npy"))
    assert (run.returncode, run.stderr) == (0, "")
    assert "2 zero vectors" in run.stdout
    assert (tmp_path / "kv.tq.safetensors").is_file()
    assert closing("2>&-", "siz").returncode == 2
    assert closing("<&-", "inspect", "-").stderr.startswith("tqtool: error[empty-file]: stdin: ")
    for stream in ("/dev/full", "&-"):
        with case(stream=stream):
            run = closing(f">{stream}", "compress", str(tmp_path / "kv.npy"), "-o", "-", "-q")
            assert run.returncode == 4
            assert run.stderr.splitlines()[-1].startswith("tqtool: error[write]: standard output: ")


def test_without_arguments_the_help_is_shown(tqtool: Run) -> None:
    run = tqtool()
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == tqtool("--help").stdout


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=str
)
def test_a_program_that_is_stopped_says_so_in_one_line(number: signal.Signals, status: int) -> None:
    command = [sys.executable, "-m", "tqtool", "inspect", "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(bytes(1 << 20))  # more than a pipe holds: when it is written, the program reads
        process.stdin.flush()
        process.send_signal(number)
        _, errors = process.communicate()
    assert process.returncode == status
    assert errors == b"tqtool: error[interrupted]: interrupted; nothing partial was left behind\n"


def test_signals_that_the_caller_ignores_stay_ignored() -> None:
    code = (
        "import os, signal, sys\n"
        "from tqtool.cli.signals import raise_when_stopped\n"
        "raise_when_stopped()\n"
        "os.kill(os.getpid(), signal.SIGHUP)\n"
        "print('still here')\n"
    )
    run = subprocess.run(
        ["nohup", sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    assert run.stdout == "still here\n"


def test_a_second_signal_does_not_stop_the_undoing() -> None:
    code = (
        "import os, signal\n"
        "from tqtool.cli.signals import STOPPING, Stopped, raise_when_stopped\n"
        "raise_when_stopped()\n"
        "try:\n    os.kill(os.getpid(), signal.SIGTERM)\n"
        "except Stopped as stop:\n"
        "    for number in STOPPING:\n        os.kill(os.getpid(), number)\n"
        "    print('undone', stop.status)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.stdout, run.stderr) == ("undone 143\n", "")


def test_names_that_are_no_text_or_that_stdout_cannot_spell(tmp_path: Path, tqtool: Run) -> None:
    for name, shown in ((os.fsdecode(b"bad\xff"), r"bad\udcff"), ("\u00fcn\u00ef", r"\xfcn\xef")):
        with case(name=name, shown=shown):
            with open(tmp_path / f"{name}.npy", "wb") as file:  # noqa: PTH123
                np.save(file, np.ones((2, 64), np.float32))
            run = tqtool("compress", f"{name}.npy", env=os.environ | {"PYTHONIOENCODING": "ascii"})
            assert run.returncode == 0, run.stderr
            assert run.stdout.startswith(f"{shown}.npy -> {shown}.tq.safetensors: ")


def test_what_acts_on_a_terminal_is_spelled_out() -> None:
    assert (
        visible("a\x1b[0m\r\n\t\x9b\u202e\udcff \u00fc\u4e2d")
        == r"a\u001b[0m\r\n\t\u009b\u202e\udcff" + " \u00fc\u4e2d"
    )
    assert visible_page("a\t\x1b[31mb\x1b[2J\n", color=True) == "a\t\x1b[31mb\\u001b[2J\n"
    assert visible_page("a\t\x1b[31mb\n", color=False) == "a\t\\u001b[31mb\n"
    assert json.loads(visible(json.dumps("\x7f\x9f", ensure_ascii=False))) == "\x7f\x9f"
