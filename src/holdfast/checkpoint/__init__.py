"""Checkpoints that are whole or invisible: how they are reserved, committed, listed, restored, checked and
expired."""
