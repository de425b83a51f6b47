"""Pure functions on lengths: which samples share a group, and which replica computes what, and when.

Knows no files, no tensors and no model, so that the planner can ask about clusters and data that do not exist. Read
`grouping` first (samples to groups), then `assign` (groups and items to replicas and microbatches) and
`pipeline_recurrence` (when a pipeline's actions end).
"""

from mmtrain.balance.assign import assign
from mmtrain.balance.batch_meta import BatchMeta, FloatArray, IntArray, ItemLengths, ItemTable, SampleLengths
from mmtrain.balance.dispatch.post_balancing import BatchCost, rebalance
from mmtrain.balance.grouping.imbalance import dist_ratio, max_over_mean, pad_ratio
from mmtrain.balance.grouping.methods import Grouping
from mmtrain.balance.grouping.pack_groups import SampleGroups, pack_groups
from mmtrain.balance.step_targets import BalancedLoad, PipelineRank, SequenceCost, StepTargets

__all__ = [
    "BalancedLoad",
    "BatchCost",
    "BatchMeta",
    "FloatArray",
    "Grouping",
    "IntArray",
    "ItemLengths",
    "ItemTable",
    "PipelineRank",
    "SampleGroups",
    "SampleLengths",
    "SequenceCost",
    "StepTargets",
    "assign",
    "dist_ratio",
    "max_over_mean",
    "pack_groups",
    "pad_ratio",
    "rebalance",
]
