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
from tqtool.cli import (
    bench,
    capture,
    check_codebooks,
    compare,
    compress,
    decompress,
    doctor,
    export_c,
    gen_codebooks,
    inspect,
    output,
    report,
    size,
    validate,
)
from tqtool.cli import eval as evaluation  # not over the function of that name
from tqtool.cli.output import Color, Settings
from tqtool.cli.signals import Stopped, raise_when_stopped
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
LONGEST = 500  # characters of an unexpected error: some of Python's quote all their data


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


# In the order of the help. Its words are values, not docstrings: those are gone under `python -OO`.
COMMANDS: tuple[tuple[Callable[..., None], str], ...] = (
    (compress.compress, compress.HELP),
    (decompress.decompress, decompress.HELP),
    (inspect.inspect, inspect.HELP),
    (size.size, size.HELP),
    (validate.validate, validate.HELP),
    (capture.capture, capture.HELP),
    (evaluation.eval, evaluation.HELP),
    (report.report, report.HELP),
    (compare.compare, compare.HELP),
    (gen_codebooks.gen_codebooks, gen_codebooks.HELP),
    (check_codebooks.check_codebooks, check_codebooks.HELP),
    (export_c.export_c, export_c.HELP),
    (bench.bench, bench.HELP),
    (doctor.doctor, doctor.HELP),
)
for _command, _help in COMMANDS:
    # A list of levels begins with a minus sign: Typer must not take it for an option.
    _listed = _command is check_codebooks.check_codebooks
    app.command(help=_help, context_settings={"ignore_unknown_options": _listed})(_command)


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
        status = _fail("usage", 2, message, _usage_hint(arguments, error))
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
            status = _fail("bug", 70, f"{repr(error)[:LONGEST]}; please report it with the output of -vv", None)
    raise SystemExit(status)


def _usage_hint(arguments: list[str], error: typer.TyperException) -> str:
    """Return where the options are listed, or how to say the name of a file that looks like an option."""
    named = [argument for argument in arguments if argument.startswith("-") and Path(argument).is_file()]
    if named:
        return f"for the file say ./{named[0]}"
    names = {command.__name__.replace("_", "-") for command, _ in COMMANDS}
    context = getattr(error, "ctx", None)  # of the command or of the program; some errors come without
    said = next((a for a in arguments if a in names), None) if context is None else context.parent and context.info_name
    return f"tqtool {said} --help lists its arguments and options" if said else "tqtool --help lists the commands"


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
