"""Programs that the training tests run and kill, and helpers that watch them."""
