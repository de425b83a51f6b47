"""Adapters on the experts of a block in the form of `peft`, which has one on each tensor of all experts.

From version 5 on `transformers` holds the experts of a block in two tensors, `gate_up_proj` and `down_proj`, whatever
files hold them apart. `peft` adapts these (`LoraConfig.target_parameters`): A of all experts lie one below the other,
(experts * rank, inputs), and B (outputs, rank * experts) has the columns of all experts' first feature first. So every
expert has an adapter of its own there too, and both forms hold the same numbers.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mmtrain.families import ParameterSource
from mmtrain.models.shapes.layer_shape import is_of_expert

if TYPE_CHECKING:
    import torch

GATE_UP, DOWN = "gate_up_proj", "down_proj"
# Our linear of an expert -> the tensor of all experts, and what `peft` calls the module around it where both have
# adapters: each is a module around the one before.
EXPERT_TENSORS = {"linear_fc1": (GATE_UP, ".base_layer"), "linear_fc2": (DOWN, "")}
# Linears of these names are taken for those of experts, which older versions held apart, if a config names them as
# modules (`peft` 0.21, `convert_peft_config_for_transformers`): in models with experts it names their weights.
TARGETED_AS_PARAMETERS = (".gate_proj", ".up_proj", ".down_proj")
_EXPERTS = ".experts."


def module_in_transformers(tensor: str) -> str:
    """Return the module of `transformers` that holds a folder's tensor; for experts the one of all of a block."""
    name = tensor.replace(".block_sparse_moe.", ".mlp.")  # folders of Mixtral keep the names of old versions
    block, is_of_experts, _ = name.partition(_EXPERTS)
    return f"{block}.experts" if is_of_experts else name.removesuffix(".weight")


def experts_by_linear(sources: Iterable[ParameterSource]) -> dict[tuple[str, str], list[ParameterSource]]:
    """Return the weights of experts in their order, by the module that holds all of a block, and by linear."""
    experts: dict[tuple[str, str], list[ParameterSource]] = {}
    for source in sources:
        if is_of_expert(source.name):
            linear = module_in_transformers(source.blocks[0].tensor), source.name.split(".")[-2]
            experts.setdefault(linear, []).append(source)
    return experts


def joined_shapes(experts: Sequence[ParameterSource], rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of `peft`'s A and B of all experts whose weights these are, with adapters of this rank."""
    *outputs, inputs = experts[0].view_shape()
    rank_of_all = rank * len(experts)
    return (rank_of_all, inputs), (math.prod(outputs), rank_of_all)


def join_experts(halves: "Sequence[tuple[torch.Tensor, torch.Tensor]]") -> "tuple[torch.Tensor, torch.Tensor]":
    """Return `peft`'s A and B of all experts from A (rank, inputs) and B (..., outputs, rank) of each, in order."""
    import torch

    a = torch.cat([of_expert for of_expert, _ in halves])
    b = torch.stack([of_expert.flatten(end_dim=-2) for _, of_expert in halves], dim=-1)
    return a, b.flatten(start_dim=1)


def split_experts(a: "torch.Tensor", b: "torch.Tensor", num_experts: int) -> "list[tuple[torch.Tensor, torch.Tensor]]":
    """Return A (rank, inputs) and B (outputs, rank) of each expert, from those of `join_experts`."""
    of_experts = b.reshape(len(b), -1, num_experts).unbind(-1)
    return list(zip(a.reshape(num_experts, -1, a.shape[1]).unbind(), of_experts, strict=True))
