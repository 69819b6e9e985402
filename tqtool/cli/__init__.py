"""The command line: options in, one library call, its value out. `app.main` is the one error boundary."""
