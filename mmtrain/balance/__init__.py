"""Pure functions on lengths: which samples share a group, and which replica computes what.

Knows no files, no tensors and no model, so that the planner can ask it about clusters and data that do not exist.
"""

from mmtrain.balance.assign import assign, longest_first
from mmtrain.balance.batch import BatchMeta, FloatArray, IntArray, ItemLengths, ItemTable, SampleLengths
from mmtrain.balance.grouping import Groups, isf, pack
from mmtrain.balance.metrics import dist_ratio, max_over_mean, pad_ratio

__all__ = [
    "BatchMeta",
    "FloatArray",
    "Groups",
    "IntArray",
    "ItemLengths",
    "ItemTable",
    "SampleLengths",
    "assign",
    "dist_ratio",
    "isf",
    "longest_first",
    "max_over_mean",
    "pack",
    "pad_ratio",
]
