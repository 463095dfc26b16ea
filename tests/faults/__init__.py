"""Real kills: processes that die in the middle of what they do, and what others find afterwards."""
