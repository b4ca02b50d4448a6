"""Runs of other processes: status, logs, lists, stop, cancel, and their ends.

Must not import resolve.
"""
