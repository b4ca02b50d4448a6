"""Samples whose label is a span or a text, and the table of samples by label."""
