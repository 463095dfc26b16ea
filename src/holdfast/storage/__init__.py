"""Somewhere to keep bytes: the Store protocol, one file per backend, retry as a decorator.

`store` states what every backend owes; `posix`, `objects` and `arrow` pay it; `locate` turns what a user wrote into one
of them. Nothing here knows what a checkpoint is.
"""
