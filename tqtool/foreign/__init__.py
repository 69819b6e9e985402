"""Codebooks that somebody else wrote: found in a file, read, and held against ours."""
