"""Hints for misspelt keys and for keys of other tools."""
