"""Time what preparing data takes from a rank that has no core besides the one it computes on.

There the thread of the loader and the passes of the rank take turns, so a token costs its rank more than its layers
take. Ranks with more cores, and those beside a GPU, prepare data while they compute.
"""

import time
from dataclasses import replace
from math import gcd

import torch

from mmtrain.balance import BalancedLoad, SequenceCost, StepTargets
from mmtrain.balance.batch_meta import SampleTokens
from mmtrain.costs.cost_table import LoadingEntry
from mmtrain.data import BatchBuilder, DataIndex, GroupStream
from mmtrain.data.loading.batch_builder import StepBuilder, StepRequest
from mmtrain.data.loading.payload import PayloadNeed
from mmtrain.machine_limits import num_available_cores
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.program import LLM
from mmtrain.recipe import Recipe

NUM_STEPS = 8  # that are timed, after one that opens files and fills caches


def measure_loading(recipe: Recipe, index: DataIndex, num_ranks: int) -> tuple[LoadingEntry, ...]:
    """Return the processor seconds that a token costs where it enters each unit.

    Nothing is returned where each rank has a core to spare, or the recipe states lengths and has no data.

    What laying out a step takes is divided among the units. Steps are laid out for a replica of each unit on each of
    the machine's `num_ranks` ranks.
    """
    states_lengths = any(source.states_lengths for source in recipe.data.sources)
    if torch.cuda.is_available() or num_available_cores() >= 2 * num_ranks or states_lengths:
        return ()
    units = {unit.name: unit.layers[0].kind for unit in build_model_shape(recipe).units}
    replicas = gcd(num_ranks, recipe.train.num_groups)
    request = StepRequest(
        step=0,
        dp=dict.fromkeys(units, replicas),
        num_microbatches=dict.fromkeys(units, recipe.train.num_groups // replicas),
        needs=(),
        step_targets=StepTargets(tuple(BalancedLoad({unit: SequenceCost(1)}) for unit in units)),
    )
    steps = StepBuilder(index, GroupStream.of(recipe, index), recipe)
    builders = {
        unit: BatchBuilder(
            index,
            recipe,
            (PayloadNeed(unit, 0, media=unit != LLM, ids=unit == LLM, labels=unit == LLM),),
            request.num_microbatches,
        )
        for unit in units
    }
    seconds, tokens = dict.fromkeys(units, 0.0), dict.fromkeys(units, 0.0)
    lengths, columns = SampleTokens(index.lengths), (LLM, *sorted(index.lengths.items))
    for step in range(1 + NUM_STEPS):
        start_s = time.thread_time()
        meta = steps.meta(replace(request, step=step))
        layout_s = time.thread_time() - start_s
        of_step = dict(zip(columns, lengths[meta.sample_id].sum(axis=0).tolist(), strict=True))
        for unit, builder in builders.items():
            start_s = time.thread_time()
            builder.build(meta)
            if step:
                seconds[unit] += time.thread_time() - start_s + layout_s / len(units)
                tokens[unit] += of_step[unit] / replicas
    return tuple(
        LoadingEntry(layer=kind, token_s=seconds[unit] / tokens[unit]) for unit, kind in units.items() if tokens[unit]
    )
