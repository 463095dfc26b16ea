"""Linux: processes, exit statuses, signals and memory limits, through prctl and /proc."""
