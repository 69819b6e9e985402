"""The program: `tqtool` and `python -m tqtool`."""


def main() -> None:
    """Run the program; an interrupt while it is still being loaded ends it without a word."""
    try:
        from tqtool.cli.app import main as run
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
