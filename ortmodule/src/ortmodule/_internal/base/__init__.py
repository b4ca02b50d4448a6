"""Mechanisms that repairs share: patches, the registry, counters, settings.

This package imports nothing of the packages above it.
"""
