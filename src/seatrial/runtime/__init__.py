"""Processes, environments, locks, and jobs on this machine, on Slurm and on Ray."""
