"""One program per contender of `bench.train`, each run as a process of its own."""
