"""The command line: options in, one library call, its value out. `main` is the one error boundary."""

from tqtool.cli.app import main

__all__ = ["main"]
