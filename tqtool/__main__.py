"""`python -m tqtool`."""

from tqtool.cli import main

main()
