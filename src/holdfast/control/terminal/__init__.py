"""Progress on the driver's terminal: what a person wants to see of a run, and no more.

`progress` is the observer; `blocks` and `box` lay its texts out in `words`, `chatter` folds what workers print, `tally`
counts for the summary, and `outlet` writes without ever holding the run up.
"""
