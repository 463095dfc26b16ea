"""Where a worker stands: the answers of `train.get_context()`.

A thin reading of the `Assignment` (see `job`) with the method names that users of Ray Train know; the session makes
one on request.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.storage.uri import join
from holdfast.worker.job import Assignment

if TYPE_CHECKING:
    from holdfast.checkpoint.handle import Checkpoint
    from holdfast.storage.store import Store

__all__ = ["StorageContext", "TrainContext"]


class StorageContext:
    """Where the run lies in storage and on this node."""

    def __init__(self, assignment: Assignment, filesystem: object | None = None) -> None:
        self._assignment = assignment
        self._filesystem = filesystem

    @property
    def uri(self) -> str:
        """The run's directory as a path or a URI."""
        return self._assignment.storage

    @property
    def experiment_dir_name(self) -> str:
        return self._assignment.experiment

    @property
    def experiment_fs_path(self) -> str:
        """The run's directory on `storage_filesystem`: without a scheme."""
        return self._directory.path

    @property
    def trial_dir_name(self) -> str:
        return _last_part(self._assignment.trial_dir)

    @property
    def trial_fs_path(self) -> str:
        return self.experiment_fs_path

    @property
    def trial_working_directory(self) -> str:
        """This worker's working directory; what it writes there are the run's artifacts."""
        return self._assignment.work_dir

    @property
    def local_working_directory(self) -> str:
        return self._assignment.work_dir

    @property
    def storage_fs_path(self) -> str:
        """`RunConfig(storage_path)` on `storage_filesystem`."""
        return self.experiment_fs_path.rpartition("/")[0]

    @property
    def storage_filesystem(self) -> Any:
        """The `pyarrow.fs.FileSystem` on which the run lies."""
        return self._directory.filesystem

    def build_checkpoint_path_from_name(self, checkpoint_name: str) -> str:
        """Where a checkpoint of this name lies on `storage_filesystem`; on remote storage `Checkpoint` needs both."""
        return f"{self.experiment_fs_path}/{checkpoint_name}"

    def extract_checkpoint_dir_name_from_path(self, checkpoint_path: str) -> str:
        """The name of a checkpoint, of the path that `build_checkpoint_path_from_name` gives."""
        name = checkpoint_path.removeprefix(f"{self.experiment_fs_path}/")
        if name == checkpoint_path:
            raise ValueError(f"{checkpoint_path} does not lie in the run's directory {self.experiment_fs_path}.")
        return name

    @staticmethod
    def make_default_checkpoint_dir_name() -> str:
        """A name by the time of day; every rank gets another."""
        return time.strftime("checkpoint_%Y-%m-%d_%H-%M-%S") + f".{time.time_ns() // 1000 % 1_000_000:06d}"

    def persist_current_checkpoint(self, checkpoint: Checkpoint, checkpoint_dir_name: str) -> Checkpoint:
        """Copy a checkpoint's files to the run's directory: for an upload function; `report` commits it."""
        from holdfast.checkpoint.handle import Checkpoint

        target = self.open().sub(checkpoint_dir_name)
        with checkpoint.as_directory() as directory:
            if target.local_root is not None:
                shutil.copytree(directory, target.local_root, dirs_exist_ok=True)
            else:
                for path in sorted(Path(directory).rglob("*")):
                    if path.is_file():
                        target.upload(path.relative_to(directory).as_posix(), path)
        return Checkpoint(join(self.uri, checkpoint_dir_name), self._filesystem)

    @property
    def _directory(self) -> Checkpoint:
        from holdfast.checkpoint.handle import Checkpoint

        return Checkpoint(self._assignment.storage, self._filesystem)

    def open(self) -> Store:
        """The run's directory as a store."""
        from holdfast.storage.locate import open_store

        return open_store(self._assignment.storage, self._filesystem)

    def __repr__(self) -> str:
        return f"StorageContext(uri={self.uri!r})"


class TrainContext:
    """The place of this worker in the group, and the names of the run."""

    def __init__(
        self, assignment: Assignment, filesystem: object | None = None, metadata: Mapping[str, Any] | None = None
    ) -> None:
        self._assignment = assignment
        self._filesystem = filesystem
        self._metadata = metadata or {}

    def get_world_size(self) -> int:
        """How many workers there are."""
        return self._assignment.world_size

    def get_world_rank(self) -> int:
        """This worker's number among all of them, from 0."""
        return self._assignment.rank

    def get_local_rank(self) -> int:
        """This worker's number on its node, from 0."""
        return self._assignment.local_rank

    def get_local_world_size(self) -> int:
        """How many workers there are on this node."""
        return self._assignment.local_world_size

    def get_node_rank(self) -> int:
        """This node's number, from 0."""
        return self._assignment.node_rank

    def get_experiment_name(self) -> str:
        """`RunConfig(name)`, or the name that was made up for it."""
        return self._assignment.experiment

    def get_trial_name(self) -> str:
        return _last_part(self._assignment.trial_dir)

    def get_trial_id(self) -> str:
        return self._assignment.trial_id

    def get_trial_dir(self) -> str:
        """The run's directory in storage."""
        return self._assignment.trial_dir

    def get_metadata(self) -> dict[str, Any]:
        """What the trainer was given as `metadata`."""
        return dict(self._metadata)

    def get_storage(self) -> StorageContext:
        return StorageContext(self._assignment, self._filesystem)

    def __repr__(self) -> str:
        here = self._assignment
        return f"TrainContext(rank={here.rank}, world_size={here.world_size}, node_rank={here.node_rank})"


def _last_part(path: str) -> str:
    from holdfast.storage.uri import split

    return split(path)[1]
