"""Measuring what attention loses: data, coders and metrics in, a report of values out."""
