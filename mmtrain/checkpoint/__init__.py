"""Checkpoints: sharded safetensors with a manifest of SHA-256 sums, committed by rename, readable in any sharding.

Read `save` first: it holds the order of writes and the reason for each barrier.

folder = save(root, Snapshot(step, shards, state, rank_state), keep=2, ranks=ranks)
checkpoint = open_newest_good(root, on_bad=print, ranks=ranks)
weight = checkpoint.read("llm.layers.0.weight", ShardSpec((64, 32), dim=0, start=32, stop=64))
"""

from mmtrain.checkpoint.folders import find, foreign_drafts, latest
from mmtrain.checkpoint.load import NEWEST, Checkpoint, ChosenCheckpoint, open_chosen, open_newest_good
from mmtrain.checkpoint.manifest import BEST_STEP, SUSPECT_SINCE
from mmtrain.checkpoint.rank_agreement import Ranks
from mmtrain.checkpoint.save import SavingRun, Snapshot, save, set_aside_newer
from mmtrain.checkpoint.storage import FileSum, LocalStorage, ProgressCallback, Storage
from mmtrain.checkpoint.tensor_pieces import Shard, ShardSpec
from mmtrain.checkpoint.verify_files import is_trusted, verify

__all__ = [
    "BEST_STEP",
    "NEWEST",
    "SUSPECT_SINCE",
    "Checkpoint",
    "ChosenCheckpoint",
    "FileSum",
    "LocalStorage",
    "ProgressCallback",
    "Ranks",
    "SavingRun",
    "Shard",
    "ShardSpec",
    "Snapshot",
    "Storage",
    "find",
    "foreign_drafts",
    "is_trusted",
    "latest",
    "open_chosen",
    "open_newest_good",
    "save",
    "set_aside_newer",
    "verify",
]
