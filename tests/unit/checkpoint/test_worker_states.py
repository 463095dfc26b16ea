"""`.workers.json`: listed in the manifest apart from the user's files, verified like them, and never given to users."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.checkpoint.commit import commit, upload_part
from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.part_records import complete_draft, write_part_record
from holdfast.checkpoint.reservation import read_reservation
from holdfast.checkpoint.reserve import reserve
from holdfast.checkpoint.verify import verify
from holdfast.checkpoint.worker_states import put_worker_states, read_worker_states
from holdfast.core.checkpoint_types import CheckpointInfo, FileEntry
from holdfast.errors import Damaged
from holdfast.storage.locate import open_store
from holdfast.storage.store import Store

STATES = {0: b'{"loader 0":{"epoch":1}}', 2: b'{"loader 0":{"epoch":2}}'}


def made(store: Store, tmp_path: Path) -> Manifest:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.pt").write_text("weights")
    draft = reserve(store)
    entry = put_worker_states(store, draft.name, 3, STATES)
    files = upload_part(store, draft, tmp_path / "mine", rank=0, parent_files=())
    return commit(store, draft, files, worker_states=entry, world_size=3)


def test_states_are_read_back_by_rank(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "run"))
    manifest = made(store, tmp_path)
    found = read_worker_states(store, manifest.name)
    assert found is not None and found.world_size == 3
    assert found.ranks == {0: {"loader 0": {"epoch": 1}}, 2: {"loader 0": {"epoch": 2}}}
    assert [one.path for one in manifest.files] == ["model.pt"]


def test_users_never_get_the_file(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "run"))
    name = made(store, tmp_path).name
    copy = Checkpoint(tmp_path / "run" / name).to_directory(tmp_path / "copy")
    assert [path.name for path in Path(copy).iterdir()] == ["model.pt"]
    assert read_worker_states(store, name) is not None


@pytest.mark.parametrize("damage", ["missing", "altered"])
def test_damage_to_the_file_is_damage_to_the_checkpoint(damage: str, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "run"))
    name = made(store, tmp_path).name
    path = tmp_path / "run" / name / ".workers.json"
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes().replace(b"2", b"3"))
    assert list(verify(store).damaged) == [name]
    with pytest.raises(Damaged, match=r"\.workers\.json"):
        read_worker_states(store, name)


def test_a_checkpoint_without_states_has_none(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "run"))
    draft = reserve(store)
    assert read_worker_states(store, commit(store, draft, []).name) is None


def test_the_states_survive_the_controller(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "run"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.pt").write_text("weights")
    draft = reserve(store)
    entry: FileEntry = put_worker_states(store, draft.name, 1, {0: STATES[0]})
    files = upload_part(store, draft, tmp_path / "mine", rank=0, parent_files=())
    info = CheckpointInfo(ranks=(0,), world_size=1, iteration=1, worker_states=entry)
    assert write_part_record(store, draft, info, 0, files, generation=1)
    owner = read_reservation(store, draft.name)
    assert owner is not None and complete_draft(store, draft.name, owner) is not None
    assert read_worker_states(store, draft.name) is not None
