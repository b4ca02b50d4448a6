"""Evaluation: loss and metrics on held-out data."""
