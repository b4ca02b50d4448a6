"""Tests on simulated hosts: network namespaces with ssh and Slurm (`make lab` opens such a lab)."""
