"""Measure how fast the simulator is: `python -m scripts.bench_simulate`.

A model of GPT-3's size (96 blocks of width 12,288) on 3,072 GPUs: tp 8, 8 pipeline ranks of 12 chunks, 48 replicas of
32 microbatches. Replica groups are alike, so the simulator follows one. Costs are modelled for H100; every batch packs
texts of random lengths into microbatches. The second figure switches off the detection of equivalent ranks and takes as
many microbatches as make a million actions.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from mmtrain.costs import AnalyticCosts, TokenLoad, num_parameters, preset
from mmtrain.costs.collectives import GroupLayout
from mmtrain.models.shapes.layer_shape import Attention, DenseMlp
from mmtrain.models.shapes.model_shape import LayerShape, ModelShape, UnitShape
from mmtrain.program import (
    LLM,
    Edge,
    Microbatch,
    ModelTiming,
    Stage,
    StageGraph,
    StageId,
    StepLoads,
    UnitMesh,
    build_1f1b,
    lower,
    simulate,
)
from mmtrain.program.simulation.rank_equivalence import representative_ranks
from scripts.measurements import arguments, start

TP, PP, DP, VPP, MICROBATCHES = 8, 8, 48, 12, 32
MILLION = 1_000_000
REPEATS = 5
BLOCK = LayerShape("decoder_block", 12288, 12288, mixer=Attention(96, 96, 128, causal=True), mlp=DenseMlp(49152))
LAYERS = (
    LayerShape("embedding", 12288, 12288, vocab=51200),
    *[BLOCK] * (PP * VPP),
    LayerShape("head", 12288, 51200, vocab=51200),
)
SHAPE = ModelShape((UnitShape(LLM, "llm", LAYERS),), (), tied_embeddings=False)

T = TypeVar("T")


@dataclass(frozen=True)
class _LayoutOfRanks(GroupLayout):
    """The layout of a group that is equal to no other group's."""

    ranks: tuple[int, ...] = ()


class NoEquivalentRanks(ModelTiming):
    """Let the simulator find no two ranks that do the same."""

    def link_class(self, ranks: tuple[int, ...]) -> GroupLayout:
        """Return a layout that names its ranks, so that every link is different."""
        layout = super().link_class(ranks)
        return _LayoutOfRanks(layout.size, layout.nodes, layout.fewest_per_node, ranks)


def main() -> None:
    report = start("Speed of the simulator", arguments(__doc__).parse_args())
    report.targets()
    graph = graph_of(DP, MICROBATCHES)
    followed, found_s = timed(lambda: representative_ranks(graph, timing(graph, 0).link_class))
    program, built_s = timed(lambda: lower(build_1f1b(graph, followed)))
    _, first_s = timed(lambda: simulate(program, timing(graph, 0)))
    again = [timed(lambda seed=seed: simulate(program, timing(graph, seed))) for seed in range(1, REPEATS + 1)]  # type: ignore[misc]
    line = again[-1][0]
    spans, spans_s = timed(lambda: len(line.spans))
    path, path_s = timed(lambda: len(line.critical_path))
    more_s = min(s for _, s in again)
    ranks = f"{graph.world_size} GPUs, one replica group of {len(line.bubbles)} ranks"
    report.figure(f"{ranks}: find {len(followed)} ranks to follow, seconds", f"{found_s:.3f}")
    report.figure("build their program, seconds", f"{built_s:.3f}")
    report.target("simulate the first batch, seconds", first_s, 0.3)
    report.target("every other, seconds", more_s, 0.3)
    report.figure(f"on demand: {spans:,} spans, seconds", f"{spans_s:.3f}")
    report.figure(f"critical path of {path:,} actions, seconds", f"{path_s:.3f}")
    simulate(program, timing(graph, 0), DP)
    _, all_s = timed(lambda: simulate(program, timing(graph, 1), DP))
    report.figure(f"all {DP} replica groups, had they loads of their own: seconds a batch", f"{all_s:.1f}")

    num_actions_per_stage = sum(map(len, lower(build_1f1b(graph_of(1, MICROBATCHES))).actions.values()))
    graph = graph_of(1, -(-MILLION * MICROBATCHES // num_actions_per_stage // PP) * PP)
    program = lower(build_1f1b(graph))
    actions = sum(map(len, program.actions.values()))
    costs = timing(graph, 0)
    separate = NoEquivalentRanks(**{name: getattr(costs, name) for name in costs.__dataclass_fields__})
    gc.collect()
    _, first_s = timed(lambda: simulate(program, separate))
    _, again_s = timed(lambda: simulate(program, separate))
    each = f"{actions:,} actions of {graph.world_size} ranks, each followed"
    report.target(f"{each}: first batch, seconds", first_s, 10)
    report.target(f"{each}: again, seconds", again_s, 10)


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return the result of the work and the processor seconds it took."""
    start = time.process_time()
    return work(), time.process_time() - start


def graph_of(dp: int, num_microbatches: int) -> StageGraph:
    """Return the pipeline: one block per stage, with the embedding on the first and the head on the last."""
    mesh = UnitMesh(LLM, TP, PP, dp, tuple(range(TP * PP * dp)), num_microbatches, VPP)
    last = PP * VPP
    borders = [0, *range(2, last + 1), len(LAYERS)]
    stages = tuple(
        Stage(StageId(LLM, s), (borders[s], borders[s + 1]), tuple(mesh.tp_group(s, r) for r in range(dp)), True)
        for s in range(last)
    )
    return StageGraph((mesh,), stages, tuple(Edge(StageId(LLM, s), StageId(LLM, s + 1)) for s in range(last - 1)))


def timing(graph: StageGraph, seed: int) -> ModelTiming:
    """Return the costs of a batch whose microbatches hold texts of about 2,048 tokens together."""
    rng = np.random.default_rng(seed)
    mesh = graph.mesh(LLM)
    lengths = rng.integers(200, 600, (graph.mesh(LLM).num_microbatches, 5))
    loads = {
        Microbatch(LLM, replica, index): TokenLoad.of(lengths[index])
        for replica in range(mesh.dp)
        for index in range(mesh.num_microbatches)
    }
    machine = replace(preset("h100-80g"), ranks_per_node=8)
    inputs = {LLM: (False, *[True] * (len(LAYERS) - 1))}
    costs = AnalyticCosts(machine, "bf16")
    return ModelTiming(graph, SHAPE, costs, StepLoads(loads, {}, {}), inputs, num_parameters, 2, machine.ranks_per_node)


if __name__ == "__main__":
    main()
