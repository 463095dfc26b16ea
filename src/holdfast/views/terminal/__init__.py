"""Progress on the driver's terminal: what a person wants to see of a run, and no more.

`progress` is the observer; `layouts` and `box` lay its texts out in `formatting`, `worker_output` folds what workers
print, `totals` counts for the summary, and `nonblocking_stream` writes without ever holding the run up.
"""
