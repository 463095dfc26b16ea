"""Packages that Ray Train has under `train.v2`, for scripts that import them from there."""
