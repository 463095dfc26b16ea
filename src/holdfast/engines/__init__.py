"""Engines start and stop agents and report which there are, nothing else."""
