"""The node's side: one agent owns its workers, their output, the parts that they staged and the uploads."""
