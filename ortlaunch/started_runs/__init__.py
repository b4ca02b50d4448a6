"""Commands on runs of other processes: status, logs, list, stop and cancel.

Must not import resolve.
"""
