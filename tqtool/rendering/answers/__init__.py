"""The answers of the other commands as text and JSON, one module a command."""
