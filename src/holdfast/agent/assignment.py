"""From the controller's orders to one worker's assignment: the node's own directories come in here."""

from __future__ import annotations

from holdfast.agent.buffers import Buffers
from holdfast.agent.session_dir import SessionDir
from holdfast.core.checkpoint_types import VerifiedFile
from holdfast.wire.messages import Prepare, Start
from holdfast.worker.job import Assignment

__all__ = ["assign"]


def assign(
    prepare: Prepare,
    start: Start,
    place: tuple[int, int],
    session: SessionDir,
    buffers: Buffers,
    verified: list[VerifiedFile],
) -> Assignment:
    """The assignment of the worker with this (rank, local rank)."""
    rank, local_rank = place
    return Assignment(
        generation=start.generation,
        rank=rank,
        local_rank=local_rank,
        node_rank=start.node_rank,
        world_size=start.world_size,
        local_world_size=start.local_world_size,
        node_count=start.node_count,
        master_address=start.master_address,
        master_port=start.master_port,
        restart_count=start.restart_count,
        max_restarts=start.max_restarts,
        checkpoint=start.checkpoint,
        checkpoints=start.checkpoints,
        iteration=start.iteration,
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
