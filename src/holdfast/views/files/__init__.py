"""Views of a run for people and TensorBoard: result.json, progress.csv, events.out.tfevents.*, params.json, error.txt.

`results` is the observer; `core.curve` says which reports count and how long each took, `rows` and `tfevents` encode
them, `sinks` keep the bytes where the run is stored. All of it is made from records and can be made again from them.
"""
