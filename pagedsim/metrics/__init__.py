"""Metrics: what a run records, and the summaries made of it."""
