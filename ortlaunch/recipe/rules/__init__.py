"""Checks across fields."""
