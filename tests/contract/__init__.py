"""Contract suites that every backend runs, against real servers."""
