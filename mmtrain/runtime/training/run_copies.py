"""The copies of a run in the memory of its nodes: where they lie, and which of them it may go on from."""

import json
import os
import uuid
from dataclasses import dataclass
from pathlib import Path

from mmtrain.checkpoint import Checkpoint, find, memory_copies
from mmtrain.checkpoint.folders import step_of
from mmtrain.checkpoint.verify_files import complete
from mmtrain.durable_files import disk_errors_named, write_whole
from mmtrain.errors import CheckpointError
from mmtrain.report.console import Console
from mmtrain.runtime.execution.checkpointing import open_checkpoint
from mmtrain.runtime.execution.peer_copies import FoundCopy, NodeMemory, find_newest_copy, open_found_copy
from mmtrain.runtime.execution.rank_context import RankContext
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, COPIES_FILE
from mmtrain.runtime.training.rank_session import RankSession
from mmtrain.runtime.world import World


@dataclass(frozen=True)
class RunCopies:
    """Where the copies of a run lie, and what they must carry to be of its present course."""

    memory: NodeMemory
    course: str


def join_copies(session: RankSession) -> RunCopies | None:
    """Return where this run copies its state; None if it does not, and copies of former times are removed.

    All ranks call this together. Raises UserError if a node has no such folder.
    """
    request, settings = session.request, session.request.recipe.train.peer_copies
    folder = request.faults.node_memory(session.world.rank, Path(settings.folder))
    root = folder / f"mmtrain-{os.geteuid()}-{session.claim.run_id}"
    if not settings.every:
        memory_copies.remove_all(root)
        return None
    is_new_course = not request.resume or request.go_back is not None
    course = session.patient_world.on_first(lambda: _course(request.run_dir, is_new_course))
    return RunCopies(NodeMemory.join(session.patient_world, root), course)


def _course(run_dir: Path, is_new: bool) -> str:
    """Return what tells the steps of this run from those that it left by starting anew or going back.

    A node that was away meanwhile may still hold copies of these.
    """
    path = run_dir / COPIES_FILE
    if not is_new:
        try:
            return str(json.loads(path.read_bytes())["course"])
        except (OSError, ValueError, TypeError, KeyError):
            pass  # copies that cannot be told apart are not used
    course = uuid.uuid4().hex[:8]
    with disk_errors_named(run_dir):
        write_whole(path, json.dumps({"course": course}) + "\n")
    return course


def open_newest(
    run_dir: Path, world: World, rank_context: RankContext, copies: RunCopies | None, console: Console
) -> tuple[Checkpoint, int | None] | None:
    """Open the newest checkpoint of a run, on disk or in memory, and say in which slot a copy lies; None before any.

    All ranks call this together. Raises CheckpointError if there are checkpoints and none is good.
    """
    root = run_dir / CHECKPOINTS_FOLDER
    copy = None if copies is None else find_newest_copy(world, copies.memory, copies.course)

    def newest_on_disk() -> int | None:
        folders = find(root)
        steps = [step_of(folder) for folder in folders if copy is None or complete(folder)]
        return next(iter(steps), -1 if folders else None)

    def open_copy(found: FoundCopy) -> tuple[Checkpoint, int]:
        assert copies is not None
        return open_found_copy(world, copies.memory, found, rank_context), found.slot

    step_on_disk: int | None = world.on_first(newest_on_disk)
    if copy is not None and (step_on_disk is None or copy.step >= step_on_disk):
        return open_copy(copy)
    if step_on_disk is None:
        return None
    try:
        checkpoint = open_checkpoint(root, rank_context, lambda text: console.print(text, style="red"), world)
    except CheckpointError:
        if copy is None:
            raise
        return open_copy(copy)
    return open_copy(copy) if copy is not None and copy.step > checkpoint.step else (checkpoint, None)
