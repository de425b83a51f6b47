"""Put recorded seconds of actions together to the step that ranks with a core each would have taken."""

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmtrain.balance import BatchMeta
from mmtrain.planning import Plan
from mmtrain.planning.evaluate.simulate_plan import plan_timing
from mmtrain.program import (
    Backward,
    Compute,
    Forward,
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
from mmtrain.program.ir.segments import direction, expand_all
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


@dataclass
class ReplayedSteps:
    """Steps that were put together from recorded actions."""

    step_s: list[float]
    # Predicted and recorded seconds by kind of action, such as `forward llm`, of all steps and stages together.
    kinds: dict[str, tuple[float, float]]


def replay_steps(recipe: Recipe, plan: Plan, batches: Sequence[BatchMeta], recorded: Path, first: int) -> ReplayedSteps:
    """Put the steps of `batches` together from the actions that ranks have recorded in `recorded`.

    Ranks of a `replicated` plan wait for each other in every layer, so an action takes as long as on the slowest rank.
    All others wait for messages, which the simulator puts between their actions.

    first: position of the first of the steps among the recorded ones.
    """
    files = [recorded / f"rank-{rank}.json" for rank in range(plan.world_size)]
    of_ranks = [json.loads(file.read_text(encoding="utf-8"))["steps"] for file in files]
    replayed = ReplayedSteps([], {})
    for number, batch in enumerate(batches, start=first):
        timing = plan_timing(recipe, plan, batch)
        program = build_program(timing.graph, kind=plan.schedule.kind, order=plan.schedule.order)
        steps = [steps[number] for steps in of_ranks]
        if plan.placement == "replicated":
            steps = [[max(of_action) for of_action in zip(*steps, strict=True)]]
            replayed.step_s.append(sum(steps[0]))
        else:
            by_action = _by_action(program, steps)
            replayed.step_s.append(simulate(program, RecordedTiming(timing, by_action)).step_time_s)
        for rank, of_rank in enumerate(steps):
            _add_kinds(replayed.kinds, program, timing, rank, of_rank)
    return replayed


def _add_kinds(
    kinds: dict[str, tuple[float, float]], program: Program, timing: ModelTiming, rank: int, seconds: Sequence[float]
) -> None:
    """Add a rank's forwards and backwards of a step to `kinds`."""
    for action, took_s in zip(expand_all(program.graph, program.for_rank(rank)), seconds, strict=True):
        if isinstance(action, Forward | Backward | Partial):
            kind = f"{'forward' if direction(action) == 'F' else 'backward'} {action.stage.unit}"
            predicted_s, recorded_s = kinds.get(kind, (0.0, 0.0))
            kinds[kind] = predicted_s + timing.compute(action), recorded_s + took_s


def _by_action(program: Program, of_ranks: Sequence[Sequence[float]]) -> dict[Action, float]:
    """Return the seconds of each action, of collectives those of the rank that took longest."""
    seconds: dict[Action, float] = {}
    for rank, of_rank in enumerate(of_ranks):
        for action, took_s in zip(expand_all(program.graph, program.for_rank(rank)), of_rank, strict=True):
            seconds[action] = max(took_s, seconds.get(action, 0.0))
    return seconds
