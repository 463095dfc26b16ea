"""Tests of `holdfast.checkpoint` on real files."""
