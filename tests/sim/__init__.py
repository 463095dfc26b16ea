"""A seeded simulator that drives the real core through faults; `python -m tests.sim --seed N --trace` replays one."""
