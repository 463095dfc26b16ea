"""What is asked of Linux: processes and their ends, signals, through prctl and /proc."""
