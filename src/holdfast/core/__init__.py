"""The pure heart of a run: events in, records and commands out. No clock, no randomness, no I/O."""
