"""Progress on the driver's terminal: what a person wants to see of a run, and no more.

`terminal` is the observer; `layouts` and `box` lay its texts out, `worker_output` folds what workers print, and
`nonblocking_stream` writes without ever holding the run up.
"""
