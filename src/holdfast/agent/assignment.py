"""One worker's `Assignment`: the controller's command, with the node's own directories and memory added."""

from __future__ import annotations

from holdfast.agent.buffers import Buffers
from holdfast.agent.session_dir import SessionDir
from holdfast.core.checkpoint_types import VerifiedFile
from holdfast.core.commands import StartWorkers
from holdfast.wire.messages import Prepare
from holdfast.worker.job import Assignment

__all__ = ["assign"]


def assign(
    prepare: Prepare,
    start: StartWorkers,
    local_rank: int,
    session: SessionDir,
    buffers: Buffers,
    verified: list[VerifiedFile],
) -> Assignment:
    """The assignment of the worker with this local rank; `start` has this node's place only."""
    (place,) = start.places
    rank = place.ranks[local_rank]
    return Assignment(
        generation=start.generation,
        rank=rank,
        local_rank=local_rank,
        node_rank=place.node_rank,
        world_size=start.world_size,
        local_world_size=len(place.ranks),
        node_count=start.node_count,
        master_address=start.master_address,
        master_port=start.master_port,
        restart_count=start.restart_count,
        max_restarts=prepare.max_restarts,
        checkpoint=start.checkpoint,
        storage=prepare.storage,
        experiment=prepare.experiment,
        trial_id=prepare.trial_id,
        trial_dir=prepare.trial_dir,
        work_dir=prepare.work_dir,
        staging_dir=str(session.staging(start.generation)),
        temp_dir=str(session.temporary(start.generation)),
        error_file=str(session.error_file(start.generation, rank)),
        change_directory=prepare.change_directory,
        buffers=buffers.of_slot(local_rank),
        snapshot_limit_bytes=buffers.limit_bytes,
        snapshots=buffers.snapshots(start.checkpoint),
        verified=verified,
    )
