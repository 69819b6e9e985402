"""The Typer application, its global options, and the boundary where errors become lines and exit statuses."""

from __future__ import annotations

import contextlib
import errno
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from tqtool import __version__
from tqtool.cli import output
from tqtool.cli.bench import bench
from tqtool.cli.capture import capture
from tqtool.cli.check_codebooks import check_codebooks
from tqtool.cli.compare import compare
from tqtool.cli.compress import compress
from tqtool.cli.decompress import decompress
from tqtool.cli.doctor import doctor
from tqtool.cli.export_c import export_c
from tqtool.cli.gen_codebooks import gen_codebooks
from tqtool.cli.inspect import inspect
from tqtool.cli.output import Color, Settings
from tqtool.cli.report import report
from tqtool.cli.signals import Stopped, raise_when_stopped
from tqtool.cli.size import size
from tqtool.cli.validate import validate
from tqtool.errors import OutputError, TqError

app = typer.Typer(
    name="tqtool",
    help="Codebooks, codec and validation for TurboQuant KV-cache compression.",
    epilog="Global options may stand before or after the command. Try: tqtool validate",
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

GLOBAL_FLAGS = {"-q", "--quiet", "-v", "-vv", "--verbose", "--no-progress"}
GLOBAL_VALUES = {"--threads", "--color"}
INTERRUPTED = 130


def _version(wanted: bool) -> None:
    if wanted:
        output.answer(f"tqtool {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    threads: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Threads; all cores unless given.", show_default=False),
    ] = None,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No notes on stderr; warnings and errors stay.")] = False,
    verbose: Annotated[
        int,
        typer.Option("-v", "--verbose", count=True, help="More notes; twice: traceback on error.", show_default=False),
    ] = 0,
    color: Annotated[Color, typer.Option(help="Colour the output.")] = "auto",
    no_progress: Annotated[bool, typer.Option("--no-progress", help="No progress bars.")] = False,
    version: Annotated[
        bool, typer.Option("-V", "--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    output.configure(Settings(threads, quiet, verbose, color, not no_progress))
    if verbose:
        from tqtool.codec.codec import engine
        from tqtool.runtime import binding as runtime

        stale = "; the C runtime was compiled for another version: reinstall tqtool" if runtime.stale else ""
        output.note(f"engine: the {'C runtime' if engine() == 'runtime' else 'NumPy reference'}{stale}", level=1)


COMMANDS: tuple[Callable[..., None], ...] = (  # in the order of the help
    compress,
    decompress,
    inspect,
    size,
    validate,
    capture,
    report,
    compare,
    gen_codebooks,
    check_codebooks,
    export_c,
    bench,
    doctor,
)
for _command in COMMANDS:
    # A list of levels begins with a minus sign: Typer must not take it for an option.
    app.command(context_settings={"ignore_unknown_options": _command is check_codebooks})(_command)


def hoist_global_options(arguments: list[str]) -> list[str]:
    """Return the arguments with the global options moved to the front, where Typer looks for them."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    front: list[str] = []
    rest: list[str] = []
    remaining = iter(arguments[:end])
    for argument in remaining:
        if argument in GLOBAL_FLAGS or argument.partition("=")[0] in GLOBAL_VALUES:
            front.append(argument)
            if argument in GLOBAL_VALUES:
                front.extend([value] if (value := next(remaining, None)) is not None else [])
        else:
            rest.append(argument)
    return front + rest + arguments[end:]


def main() -> None:
    """Run the program: the one place where errors become lines and exit statuses."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a closed pipe ends us with 141
    raise_when_stopped()
    output.prepare_streams()
    arguments = sys.argv[1:] or ["--help"]
    try:
        result = app(hoist_global_options(arguments), standalone_mode=False)
        if result == INTERRUPTED:  # Typer has made a status of it
            raise KeyboardInterrupt
        status = result if isinstance(result, int) else 0
    except TqError as error:
        if output.settings().verbose > 1:
            raise
        status = _fail(error.code, error.status, str(error), error.hint, error.path)
    except typer.TyperException as error:
        message = " ".join(error.format_message().split())
        status = _fail("usage", 2, message, _usage_hint(arguments))
    except (Stopped, KeyboardInterrupt, typer.Abort) as error:
        status = error.status if isinstance(error, Stopped) else INTERRUPTED
        output.print_error("interrupted", "interrupted; nothing partial was left behind", None)
    except MemoryError:
        status = _fail("memory", 6, "not enough memory for this job", "use fewer --threads or a smaller input")
    except Exception as error:
        if output.settings().verbose > 1:
            raise
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EBADF):  # Typer's help
            status = _fail("write", 4, f"standard output: {error.strerror}", None)
        else:
            status = _fail("bug", 70, f"{error!r}; please report it with the output of -vv", None)
    raise SystemExit(status)


def _usage_hint(arguments: list[str]) -> str:
    """Return where the options are listed, or how to say the name of a file that looks like an option."""
    named = [argument for argument in arguments if argument.startswith("-") and Path(argument).is_file()]
    return f"for the file say ./{named[0]}" if named else "tqtool --help lists the commands and their options"


def _fail(code: str, status: int, message: str, hint: str | None, path: str | None = None) -> int:
    output.print_error(code, message, hint)
    if "--json" in sys.argv:
        document = {
            "schema": "tqtool.error/1",
            "code": code,
            "exit": status,
            "message": message,
            "hint": hint,
            "path": path,
        }
        with contextlib.suppress(OutputError):  # stdout itself may be what failed
            output.answer(json.dumps(document, ensure_ascii=False))
    return status
