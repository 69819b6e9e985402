"""The format: its vocabulary, tables, rotation and packing; the readable reference; encode and decode."""
