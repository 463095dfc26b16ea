"""The journal: durable records as lines in segments; writer, reader, format, and the fold beside it."""
