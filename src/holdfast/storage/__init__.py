"""Where bytes are kept: the Store protocol, one subpackage per backend, retry as a decorator.

`store` states what every backend owes; `posix`, `objects` and `arrow` are the backends; `uri` has the syntax of paths,
and `locate` opens the store that one names. Nothing here knows what a checkpoint is.
"""
