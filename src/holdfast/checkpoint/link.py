"""Give a run a checkpoint of another run below the same root: a commit like any other, whose files are links or
server-side copies where the storage has them, so that no bytes move through this process."""

from __future__ import annotations

from functools import partial

from holdfast.checkpoint import layout
from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.commit import abandon, commit
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.reserve import reserve
from holdfast.core.checkpoint_types import FileEntry
from holdfast.errors import NotCommitted, NotFound
from holdfast.runtime import current
from holdfast.storage.store import Store

__all__ = ["link_checkpoint"]

_THREADS = 16


def link_checkpoint(root: Store, donor: str, name: str, run: str, *, epoch: int, at_least: int, token: str) -> Manifest:
    """Commit the checkpoint `name` of the run in the directory `donor` as the newest of the run in the directory `run`,
    with an index of `at_least` or more. `token` is the new checkpoint's: if the run has a checkpoint with it already,
    that is returned. Raises `NotCommitted`, `Damaged` or `NotFound` where the donor has no such checkpoint whole."""
    origin, target = root.sub(donor), root.sub(run)
    for known in Catalog(target).committed():
        if known.token == token:
            return known
    source = Catalog(origin).get(name)
    draft = reserve(target, epoch=epoch, at_least=at_least, token=token)
    try:
        copy = partial(_copy, root, f"{donor}/{name}", f"{run}/{draft.name}")
        current().map_in_threads(copy, [entry.path for entry in source.all_files], _THREADS)
        try:
            copy(layout.METADATA)
        except NotFound:
            pass  # it has none
        now = Catalog(origin).read_manifest(name).manifest
        if now is None or now.token != source.token:  # what was copied may be of another checkpoint of that name
            raise NotCommitted(f"{origin.uri}: {name} was removed while it was linked; use another checkpoint.")
        directories = [FileEntry(path=path, size_bytes=0, blake3="", directory=True) for path in source.directories]
        if target.local_root is not None:
            for path in source.directories:
                (target.local_root / draft.name / path).mkdir(parents=True, exist_ok=True)
        return commit(
            target,
            draft,
            [*source.files, *directories],
            metrics=source.metrics,
            world_size=source.world_size,
            iteration=source.iteration,
            worker_states=source.worker_states,
        )
    except BaseException:
        abandon(target, draft)
        raise


def _copy(root: Store, origin: str, target: str, path: str) -> None:
    root.copy(f"{origin}/{path}", f"{target}/{path}")
