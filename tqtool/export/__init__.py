"""What C engines receive: the header, the package around the runtime, and the compiler that tries it."""
