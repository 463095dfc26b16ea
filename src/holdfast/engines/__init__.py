"""Engines start and stop agents and tell which there are, nothing else."""
