"""Verbs of the group Cluster in `--help`."""
