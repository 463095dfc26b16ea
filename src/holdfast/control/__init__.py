"""The controller: one per run, in the process that calls `fit()`; the pure core decides, this shell does the I/O."""
