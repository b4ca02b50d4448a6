"""Verbs of the group Setup in --help."""
