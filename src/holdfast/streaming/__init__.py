"""Storage that only the driver's machine has, for agents and workers of other machines."""
