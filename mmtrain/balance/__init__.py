"""Pure functions on lengths: which samples share a group, and which replica computes what.

Knows no files, no tensors and no model, so that the planner can ask it about clusters and data that do not exist.
"""

from mmtrain.balance.assign import assign
from mmtrain.balance.batch_meta import BatchMeta, FloatArray, IntArray, ItemLengths, ItemTable, SampleLengths
from mmtrain.balance.grouping import SampleGroups, group_by_isf, pack_groups
from mmtrain.balance.imbalance import dist_ratio, max_over_mean, pad_ratio
from mmtrain.balance.long_samples import split_long_samples
from mmtrain.balance.lpt import longest_first
from mmtrain.balance.matched import group_matched
from mmtrain.balance.methods import Grouping
from mmtrain.balance.node_rearrangement import rearrange_across_nodes
from mmtrain.balance.post_balancing import BatchCost, dominant_sample, rebalance
from mmtrain.balance.rearrangement import Rearrangement
from mmtrain.balance.reordering import across_replicas, reorder_microbatches
from mmtrain.balance.step_targets import BalancedLoad, PipelineRank, SequenceCost, StepTargets
from mmtrain.balance.steps import assemble_steps

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
    "Rearrangement",
    "SampleGroups",
    "SampleLengths",
    "SequenceCost",
    "StepTargets",
    "across_replicas",
    "assemble_steps",
    "assign",
    "dist_ratio",
    "dominant_sample",
    "group_by_isf",
    "group_matched",
    "longest_first",
    "max_over_mean",
    "pack_groups",
    "pad_ratio",
    "rearrange_across_nodes",
    "rebalance",
    "reorder_microbatches",
    "split_long_samples",
]
