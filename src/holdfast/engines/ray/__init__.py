"""The Ray engine: agents on the nodes of a Ray cluster, in placement groups. `ray` is imported in this package only,
and only when a run asks for it."""
