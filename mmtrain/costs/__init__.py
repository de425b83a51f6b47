"""Seconds and bytes of layers, messages and collectives: measured, or modelled from shapes and hardware presets.

Start with `cost_model.CostModel`. `AnalyticCosts` models it, `MeasuredCosts` interpolates a table of measurements;
`rank_memory` adds up what a rank must hold. Nothing here imports torch.
"""

from mmtrain.costs.analytic_costs import AnalyticCosts
from mmtrain.costs.choose import costs_for, machine_for, machine_with_spread, precision_for
from mmtrain.costs.collectives import CollectiveKind, GroupLayout
from mmtrain.costs.cost_model import UNDIVIDED, ComputeKind, CostModel, LayerWork, PieceCost, TokenLoad, TokenSplit
from mmtrain.costs.cost_table import CostTable
from mmtrain.costs.find_hardware import preset, preset_for_device
from mmtrain.costs.hardware import Hardware, Precision
from mmtrain.costs.hardware_presets import PRESETS
from mmtrain.costs.layer_arithmetic import input_grad_needed, model_flops, num_parameters, num_trained_parameters
from mmtrain.costs.measured_costs import MeasuredCosts
from mmtrain.costs.rank_memory import HeldLayers, RankMemory, StateBytes, StateCopies, rank_memory, state_bytes

__all__ = [
    "PRESETS",
    "UNDIVIDED",
    "AnalyticCosts",
    "CollectiveKind",
    "ComputeKind",
    "CostModel",
    "CostTable",
    "GroupLayout",
    "Hardware",
    "HeldLayers",
    "LayerWork",
    "MeasuredCosts",
    "PieceCost",
    "Precision",
    "RankMemory",
    "StateBytes",
    "StateCopies",
    "TokenLoad",
    "TokenSplit",
    "costs_for",
    "input_grad_needed",
    "machine_for",
    "machine_with_spread",
    "model_flops",
    "num_parameters",
    "num_trained_parameters",
    "precision_for",
    "preset",
    "preset_for_device",
    "rank_memory",
    "state_bytes",
]
