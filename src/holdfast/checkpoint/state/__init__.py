"""States: nested structures of tensors and plain values, written as plain files and read back. docs/state-format.md."""
