"""Brings the runs of a study to their end: as processes of this machine, by Slurm, or by Ray."""
