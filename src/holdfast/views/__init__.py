"""What people see of a run, made from its records alone: result files, the terminal, the narrative, accounting."""
