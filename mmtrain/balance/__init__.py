"""Pure functions on lengths: which samples share a group, and which replica computes what.

Knows no files, no tensors and no model, so that the planner can ask it about clusters and data that do not exist.
"""

from mmtrain.balance.assign import assign
from mmtrain.balance.batch_meta import BatchMeta, FloatArray, IntArray, ItemLengths, ItemTable, SampleLengths
from mmtrain.balance.grouping import Groups, isf, pack
from mmtrain.balance.imbalance import dist_ratio, max_over_mean, pad_ratio
from mmtrain.balance.long_samples import split_long
from mmtrain.balance.lpt import longest_first
from mmtrain.balance.matched import matched
from mmtrain.balance.methods import Grouping
from mmtrain.balance.node_rearrangement import rearrange
from mmtrain.balance.post_balancing import Cost, dominant, rebalance
from mmtrain.balance.rearrangement import Rearrangement
from mmtrain.balance.reordering import across_replicas, across_time
from mmtrain.balance.step_targets import Load, Place, Price, StepAims
from mmtrain.balance.steps import assemble

__all__ = [
    "BatchMeta",
    "Cost",
    "FloatArray",
    "Grouping",
    "Groups",
    "IntArray",
    "ItemLengths",
    "ItemTable",
    "Load",
    "Place",
    "Price",
    "Rearrangement",
    "SampleLengths",
    "StepAims",
    "across_replicas",
    "across_time",
    "assemble",
    "assign",
    "dist_ratio",
    "dominant",
    "isf",
    "longest_first",
    "matched",
    "max_over_mean",
    "pack",
    "pad_ratio",
    "rearrange",
    "rebalance",
    "split_long",
]
