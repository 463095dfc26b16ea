"""A checkpoint of one run becomes one of another, without its bytes being moved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.checkpoint.far_store import FarStore, write_source

from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.commit import commit_directory
from holdfast.checkpoint.link import link_checkpoint
from holdfast.checkpoint.removal import remove
from holdfast.checkpoint.verify import verify
from holdfast.errors import NotCommitted, NotFound
from holdfast.storage.posix.store import PosixStore
from holdfast.storage.store import Store

TOKEN = "ab" * 16


@pytest.fixture(params=["files", "objects"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return PosixStore(tmp_path / "root") if request.param == "files" else FarStore(tmp_path / "root", exclusive=True)


def test_a_checkpoint_is_linked_once(root: Store, tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", model="weights", layers__0="zero")
    (source / "empty").mkdir()
    (source / ".metadata.json").write_text('{"by": "me"}')
    given = commit_directory(root.sub("donor"), source, metrics={"loss": 1.5})
    commit_directory(root.sub("run"), source, metrics={"loss": 9})
    linked = link_checkpoint(root, "donor", given.name, "run", epoch=0, at_least=4, token=TOKEN)
    assert (linked.name, linked.metrics, linked.files) == ("checkpoint_000004", {"loss": 1.5}, given.files)
    assert verify(root.sub("run"), deep=True).intact
    assert root.get("run/checkpoint_000004/.metadata.json") == b'{"by": "me"}'
    again = link_checkpoint(root, "donor", given.name, "run", epoch=0, at_least=4, token=TOKEN)
    assert again == linked and Catalog(root.sub("run")).newest() == linked


def test_a_link_that_failed_may_be_tried_again(root: Store, tmp_path: Path) -> None:
    given = commit_directory(root.sub("donor"), write_source(tmp_path / "source", model="weights"))
    root.delete([f"donor/{given.name}/model"])
    with pytest.raises(NotFound):
        link_checkpoint(root, "donor", given.name, "run", epoch=0, at_least=0, token=TOKEN)
    root.put(f"donor/{given.name}/model", b"weights")
    linked = link_checkpoint(root, "donor", given.name, "run", epoch=0, at_least=0, token=TOKEN)
    assert verify(root.sub("run"), deep=True).ok == [linked]


class _ReplacingStore(FarStore):
    """Somebody replaces the donor's checkpoint before the last of its files is copied."""

    action: Callable[[], None] | None = None

    def copy(self, source: str, target: str) -> None:
        if source.endswith("model") and self.action is not None:
            action, self.action = self.action, None
            action()
        super().copy(source, target)


def test_a_donor_that_is_replaced_meanwhile_gives_no_checkpoint(tmp_path: Path) -> None:
    root = _ReplacingStore(tmp_path / "root")
    other = FarStore(tmp_path / "root").sub("donor")
    commit_directory(other, write_source(tmp_path / "source", model="weights"), name="best")

    def replace() -> None:
        remove(other, "best")
        commit_directory(other, write_source(tmp_path / "other", model="WEIGHTS"), name="best")

    root.action = replace
    with pytest.raises(NotCommitted, match="best was removed while it was linked"):
        link_checkpoint(root, "donor", "best", "run", epoch=0, at_least=0, token=TOKEN)
    assert root.action is None and Catalog(root.sub("run")).committed() == []


def test_files_on_one_disk_are_shared(tmp_path: Path) -> None:
    root = PosixStore(tmp_path / "root")
    given = commit_directory(root.sub("donor"), write_source(tmp_path / "source", model="weights"))
    linked = link_checkpoint(root, "donor", given.name, "run", epoch=0, at_least=0, token=TOKEN)
    paths = [tmp_path / "root" / run / name / "model" for run, name in (("donor", given.name), ("run", linked.name))]
    assert paths[0].read_text() == paths[1].read_text() == "weights"


def test_a_donor_without_the_checkpoint_leaves_nothing_behind(root: Store, tmp_path: Path) -> None:
    commit_directory(root.sub("donor"), write_source(tmp_path / "source", model="weights"))
    with pytest.raises(NotCommitted):
        link_checkpoint(root, "donor", "checkpoint_000009", "run", epoch=0, at_least=0, token=TOKEN)
    assert Catalog(root.sub("run")).names() == []
