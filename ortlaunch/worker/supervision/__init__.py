"""A rank's supervisor: heartbeats, stalls, lost hosts, stop requests, ends and logs.

Must not import torch at the top of a module: a supervisor is light. gpus.py, which ranks import, is the exception.
"""
