"""The compressed file; docs/container.md is its definition."""
