"""Pure functions on lengths: which samples share a group, and which replica computes what.

Knows no files, no tensors and no model, so that the planner can ask it about clusters and data that do not exist.
"""

from mmtrain.balance.assign import assign, longest_first
from mmtrain.balance.batch import BatchMeta, IntArray, ItemLengths, ItemTable, SampleLengths
from mmtrain.balance.grouping import Groups, pack

__all__ = [
    "BatchMeta",
    "Groups",
    "IntArray",
    "ItemLengths",
    "ItemTable",
    "SampleLengths",
    "assign",
    "longest_first",
    "pack",
]
