"""What layers and messages cost in seconds and bytes: measured, or modelled from shapes and presets; no torch."""

from mmtrain.costs.analytic import model_flops, parameters, upstream_trains
from mmtrain.costs.choose import costs_for
from mmtrain.costs.hardware import PRESETS, Hardware, Precision, preset, preset_for_device
from mmtrain.costs.measured import MeasuredCosts
from mmtrain.costs.memory import HeldLayers, RankMemory, rank_memory
from mmtrain.costs.model import AnalyticCosts
from mmtrain.costs.table import CostTable
from mmtrain.costs.types import CollectiveKind, ComputeKind, CostModel, PieceCost, TokenLoad

__all__ = [
    "PRESETS",
    "AnalyticCosts",
    "CollectiveKind",
    "ComputeKind",
    "CostModel",
    "CostTable",
    "Hardware",
    "HeldLayers",
    "MeasuredCosts",
    "PieceCost",
    "Precision",
    "RankMemory",
    "TokenLoad",
    "costs_for",
    "model_flops",
    "parameters",
    "preset",
    "preset_for_device",
    "rank_memory",
    "upstream_trains",
]
