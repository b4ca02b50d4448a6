"""A rank's supervisor: heartbeats, stalls, lost hosts, stop requests, exit records and logs.

No module here may import torch at its top, because a supervisor must stay light. The exception is
gpus.py, which only ranks import.
"""
