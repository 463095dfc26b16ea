"""Our public names against those of an installed Ray, and the list of deliberate differences."""
