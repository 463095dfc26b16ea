"""Modules that Ray Train has under `train.v2.api`, for scripts that import from there."""
