"""Tests on hosts of their own: network namespaces with ssh between them, and Slurm (`make lab` opens such a lab)."""
