"""Tests of states: flattened, written, read back."""
