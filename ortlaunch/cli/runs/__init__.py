"""Verbs of the group Runs in --help."""
