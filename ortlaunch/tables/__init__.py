"""Tables with a row for each task, metric, precision, launcher, optimizer and model family.

Standard library only, for every side.
"""
