"""States: taken apart, written, read back."""
