"""Checkpoints that are complete or invisible: reserve, upload, commit, list, restore, verify and remove them."""
