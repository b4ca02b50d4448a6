"""Mechanisms that repairs share: patches, the registry, counters, settings.

Imports nothing of the rooms above.
"""
