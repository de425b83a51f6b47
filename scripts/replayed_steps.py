"""Put recorded seconds of actions together to the step that ranks with a core each would have taken."""

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmtrain.balance import BatchMeta
from mmtrain.planning import Plan
from mmtrain.planning.evaluate.simulate_plan import plan_timing
from mmtrain.program import (
    Compute,
    Microbatch,
    ModelTiming,
    Partial,
    Program,
    Send,
    StageId,
    TransferCost,
    build_program,
    simulate,
)
from mmtrain.program.ir.actions import Action, Collective
from mmtrain.recipe import Recipe


@dataclass(frozen=True)
class RecordedTiming:
    """A `Timing` of recorded seconds of actions; messages take what they are predicted to."""

    timing: ModelTiming
    seconds: Mapping[Action, float]

    def compute(self, action: Compute) -> float:
        """See `Timing`."""
        return self.seconds[action]

    def left_under_way(self, action: Partial) -> float:
        """See `Timing`."""
        return self.timing.left_under_way(action)

    def tp_wait(self, action: Compute) -> float:
        """See `Timing`."""
        return 0.0

    def message(self, sender: int, action: Send) -> TransferCost:
        """See `Timing`."""
        return self.timing.message(sender, action)

    def collective(self, rank: int, action: Collective, group: tuple[int, ...]) -> TransferCost:
        """See `Timing`."""
        return TransferCost(self.seconds[action], self.timing.collective(rank, action, group).nbytes)

    def link_class(self, ranks: tuple[int, ...]) -> Hashable:
        """See `Timing`."""
        return self.timing.link_class(ranks)

    def activation_bytes(self, stage: StageId, mb: Microbatch) -> int:
        """See `Timing`."""
        return self.timing.activation_bytes(stage, mb)


def replayed_steps(recipe: Recipe, plan: Plan, batches: Sequence[BatchMeta], recorded: Path, first: int) -> list[float]:
    """Return the seconds of the steps of `batches`, whose actions ranks have recorded in `recorded`.

    first: position of the first of them among the recorded steps.

    Ranks of a `replicated` plan wait for each other in every layer, so an action takes as long as on the slowest rank.
    All others wait for messages, which the simulator puts between their actions.
    """
    of_ranks = [
        json.loads((recorded / f"rank-{rank}.json").read_text(encoding="utf-8"))["steps"]
        for rank in range(plan.world_size)
    ]
    return [
        _replayed(recipe, plan, batch, [steps[first + number] for steps in of_ranks])
        for number, batch in enumerate(batches)
    ]


def _replayed(recipe: Recipe, plan: Plan, batch: BatchMeta, of_ranks: Sequence[Sequence[float]]) -> float:
    if plan.placement == "replicated":
        return sum(map(max, zip(*of_ranks, strict=True)))
    timing = plan_timing(recipe, plan, batch)
    program = build_program(timing.graph, kind=plan.schedule.kind, order=plan.schedule.order)
    return simulate(program, RecordedTiming(timing, _by_action(program, of_ranks))).step_time_s


def _by_action(program: Program, of_ranks: Sequence[Sequence[float]]) -> dict[Action, float]:
    """Return the seconds of each action, of collectives those of the rank that took longest."""
    seconds: dict[Action, float] = {}
    for rank, of_rank in enumerate(of_ranks):
        for action, took_s in zip(program.for_rank(rank), of_rank, strict=True):
            seconds[action] = max(took_s, seconds.get(action, 0.0))
    return seconds
