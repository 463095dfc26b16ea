"""Faults in real processes: kills at every moment, and what other processes find afterwards."""
