"""The command line: `holdfast ckpt ...` and what else people type. Each command's module is imported when it is run."""
