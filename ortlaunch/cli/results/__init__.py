"""Verbs of the group Result in --help."""
