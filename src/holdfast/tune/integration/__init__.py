"""Callbacks that report to a trial: of a trainer whose `fit()` a trial calls (`ray_train`), and of frameworks."""
