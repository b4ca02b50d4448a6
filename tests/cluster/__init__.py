"""Tests on several hosts: network namespaces with ssh between them, and Slurm.

`make lab` opens a shell in such a lab.
"""
