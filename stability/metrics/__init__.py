"""Measures on tensors: deviation, ULPs, Wasserstein distance, drift. Pure: torch and nothing else."""
