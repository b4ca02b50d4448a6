"""Verbs of the group Train in --help."""
