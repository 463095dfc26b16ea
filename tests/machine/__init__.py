"""The run's machine: events in, exact records and commands out."""
