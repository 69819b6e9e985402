"""A report as values: its model, gates, aggregation, comparison and exact serialization."""
