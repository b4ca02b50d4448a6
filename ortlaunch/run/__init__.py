"""One run by this command: its choices, start, restarts and verdict.

The run's folder belongs to run_folder.
"""
