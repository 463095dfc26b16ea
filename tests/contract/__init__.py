"""Suites that every implementation of a protocol runs, for real."""
