"""The command line: options in, one library call, its value out. `app.main` is the one error boundary."""

__all__ = ["main"]


def main() -> None:
    """Run the program; an interrupt while it is still being loaded ends it without a word."""
    try:
        from tqtool.cli.app import main as run
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    run()
