"""Run plans in turn as one rank: a step of each, then the next step of each.

Other work on the machine and its temperature change over minutes. Plans that take turns all meet the same.
"""

import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import torch

from mmtrain.balance import BatchMeta
from mmtrain.balance.step_targets import StepTargets
from mmtrain.costs import RankMemory, TokenLoad
from mmtrain.data import BatchBuilder, DataIndex, GroupStream, build_index
from mmtrain.errors import EndedBySignal, MmtrainError, RankDied, RunError, UserError
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning.artifact.balancing_targets import derive_step_targets
from mmtrain.planning.artifact.plan import LargestMicrobatch, Plan
from mmtrain.planning.artifact.plan_memory import plan_memory
from mmtrain.program.ir.step_loads import step_loads
from mmtrain.recipe import Recipe
from mmtrain.runtime.execution.fault_points import FaultPoints
from mmtrain.runtime.execution.process_groups import release_groups
from mmtrain.runtime.execution.rank_context import RankContext, build_rank_context
from mmtrain.runtime.resilience.failures import is_lost_peer
from mmtrain.runtime.resilience.launch import launch_here
from mmtrain.runtime.resilience.out_of_memory import (
    is_out_of_memory,
    peak_memory_bytes,
    peak_reserved_bytes,
    start_memory_peak,
)
from mmtrain.runtime.world import Address, World, join, leave, limit_threads

PLAN_WARM_UP_STEPS = 2  # after a plan is built: fill caches and open connections

_RESULTS_FILE = "turns.jsonl"  # of the first rank: a `TakenTurn` in each line
_FAILURE_FILE = "failure-{rank}.json"
_STARTED_FILE = "started-{rank}.json"  # the number of the plan whose turn it is, and how many are built


@dataclass(frozen=True)
class Turns:
    """Plans to run in turn, all on the same number of ranks."""

    recipe: Recipe
    plans: Mapping[int, Plan]  # by number
    num_done: Mapping[int, int]  # steps of each that are measured already
    num_steps: int  # to measure of each
    stay_built: bool  # between their turns; else a plan is built, and warmed up, for each turn
    faults: FaultPoints

    @property
    def world_size(self) -> int:
        """The number of ranks of each plan."""
        return next(iter(self.plans.values())).world_size


@dataclass(frozen=True)
class TakenTurn:
    """What all ranks saw in one measured step of a plan."""

    plan: int  # its number
    seconds: float  # of the slowest rank
    # What each rank held beside what was counted for its batches; None: unknown, or not a plan's first turn.
    memory_ratios: Sequence[float] | None


@dataclass(frozen=True)
class TurnFailure:
    """How a rank failed in the turn of a plan."""

    rank: int
    plan: int  # its number
    text: str
    num_built: int  # plans that were built in its process, this one included
    is_secondary: bool = False  # another rank was gone
    is_out_of_memory: bool = False
    held_bytes: float = 0.0  # when memory ran out
    counted_bytes: float = 0.0  # for this rank at its peak, by the plan


@dataclass(frozen=True)
class LaunchPart:
    """What the ranks that one process started saw of some turns, until they ended."""

    turns: Sequence[TakenTurn] = ()  # of the first rank
    failures: Sequence[TurnFailure] = ()
    error: MmtrainError | None = None  # that no plan is to blame for

    @property
    def has_failed(self) -> bool:
        """Whether a rank ended before its last turn, and not because ranks of other processes had."""
        return bool(self.failures) or self.error is not None


def run_part(turns: Turns, addresses: Sequence[Address], must_end: Callable[[], bool] | None = None) -> LaunchPart:
    """Run the turns as these ranks, in processes of this machine, and return what they left behind.

    must_end: see `launch_here`. Raises EndedBySignal.
    """
    error: MmtrainError | None = None
    with TemporaryDirectory(prefix="mmtrain-measure-") as name:
        folder = Path(name)
        try:
            launch_here(addresses, partial(take_turns, turns, folder), must_end=must_end)
        except EndedBySignal:
            raise
        except MmtrainError as failed:
            error = failed
        reports = sorted(folder.glob(_FAILURE_FILE.format(rank="*")))
        failures = [TurnFailure(**json.loads(report.read_bytes())) for report in reports]
        if isinstance(error, RankDied):
            failures += _failures_of_killed(folder, error)
            error = RunError(str(error))  # which other processes can read
        has_ended_for_others = must_end is not None and must_end()
        if isinstance(error, RunError) and (failures or has_ended_for_others):
            error = None
        results = folder / _RESULTS_FILE
        lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    return LaunchPart([TakenTurn(**json.loads(line)) for line in lines], failures, error)


def _failures_of_killed(folder: Path, error: RankDied) -> list[TurnFailure]:
    """Return the failure of a rank that was killed in a turn, as the system does where the host's memory runs out."""
    started = folder / _STARTED_FILE.format(rank=error.rank)
    if not started.exists():
        return []
    plan, num_built = json.loads(started.read_bytes())
    return [TurnFailure(error.rank, plan, str(error), num_built)]


def take_turns(turns: Turns, folder: Path, address: Address) -> None:
    """Run the plans in turn as one rank; leave in `folder` what all ranks saw, and how this one failed.

    The plans train on the run's own first batches, loaded before the clock starts, with a learning rate of 0.
    """
    limit_threads(address)
    world = join(address)
    taker = _TurnTaker(turns, world, folder)
    turns.faults.start(world.rank)
    for step in range(turns.num_steps):
        # There and back, so that no plan always comes after the same one, or first.
        for number in [*turns.plans][:: -1 if step % 2 else 1]:
            if turns.num_done[number] <= step:
                with taker.failures_reported(number):
                    taker.take(number, step)
    leave()


@dataclass
class _BuiltPlan:
    """A plan that is built on this rank."""

    plan: Plan
    context: RankContext
    builder: BatchBuilder
    targets: StepTargets
    counted_bytes: float = 0.0  # for this rank and the fullest batch so far
    communicator_bytes: float = 0.0


class _TurnTaker:
    """Builds plans on one rank and runs their steps."""

    def __init__(self, turns: Turns, world: World, folder: Path) -> None:
        self._turns, self._world, self._folder = turns, world, folder
        self._index: DataIndex = build_index(turns.recipe)
        self._stream = GroupStream.of(turns.recipe, self._index)
        self._built: dict[int, _BuiltPlan] = {}
        self._bytes_before = 0

    def take(self, number: int, step: int) -> None:
        """Measure one step of a plan, after warm-up if it is new here."""
        is_new = number not in self._built
        num_built = len(self._built) + is_new
        self._path(_STARTED_FILE).write_text(json.dumps([number, num_built]), encoding="utf-8")
        if is_new:
            self._bytes_before = start_memory_peak(self._world.device)
            self._built[number] = self._build(self._turns.plans[number])
            for warm_up in range(PLAN_WARM_UP_STEPS):
                self._step(self._built[number], warm_up, counts=True)
        seconds = self._step(self._built[number], PLAN_WARM_UP_STEPS + step, counts=is_new)
        ratio = self._memory_ratio(self._built[number]) if is_new else None
        if not self._turns.stay_built:
            self._drop(number)
        seen = cast(list[tuple[float, float | None]], self._world.all_gather((seconds, ratio)))
        if self._world.is_first:
            slowest_s, ratios = max(seconds for seconds, _ in seen), [r for _, r in seen if r is not None]
            turn = TakenTurn(number, slowest_s, ratios or None)
            with (self._folder / _RESULTS_FILE).open("a", encoding="utf-8") as results:
                results.write(json.dumps(asdict(turn)) + "\n")

    @contextmanager
    def failures_reported(self, number: int) -> Iterator[None]:
        """Leave a report of what fails in the turn of a plan. Wrong input is no failure of the plan."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            failure = self._failure(number, error)
            self._path(_FAILURE_FILE).write_text(json.dumps(asdict(failure)), encoding="utf-8")
            if failure.is_out_of_memory or failure.is_secondary:  # no error of ours, so nothing to trace back
                raise RunError(failure.text) from error
            raise

    def _build(self, plan: Plan) -> _BuiltPlan:
        recipe, faults = self._turns.recipe, self._turns.faults
        context = build_rank_context(recipe, plan, self._world, faults=faults)
        builder = BatchBuilder(self._index, recipe, context.needs, context.num_microbatches)
        return _BuiltPlan(plan, context, builder, derive_step_targets(recipe, plan, self._index.lengths))

    def _step(self, built: _BuiltPlan, step: int, counts: bool) -> float:
        """Run one step and return its seconds on this rank; `counts`: count what memory its batch needs."""
        recipe, context = self._turns.recipe, built.context
        num_groups = recipe.train.num_groups
        batch = self._stream.batch(step, num_groups, context.dp, context.num_microbatches, built.targets)
        data = built.builder.build(batch)
        self._world.barrier()
        record = context.train(data, lr=0.0).record
        if counts:
            counted = counted_memory(recipe, built.plan, context, batch)
            built.counted_bytes = max(built.counted_bytes, counted.total)
            built.communicator_bytes = counted.communicators
        return record.end_s - record.start_s

    def _memory_ratio(self, built: _BuiltPlan) -> float | None:
        """Return what this rank held for a new plan beside what was counted for the batches that it ran.

        None: not known, since a process without a GPU knows one peak for all the plans that it runs.
        """
        if self._world.device.type == "cpu" and len(self._turns.plans) > 1:
            return None
        # What communicators hold is not the allocator's, so it is taken as counted.
        return (self._held_bytes() + built.communicator_bytes) / built.counted_bytes

    def _held_bytes(self) -> float:
        """Return the most bytes held since the newest plan was built, without those held before."""
        device = self._world.device
        return (peak_reserved_bytes(device) or peak_memory_bytes(device)) - self._bytes_before

    def _drop(self, number: int) -> None:
        """Give back the memory and the connections of a plan."""
        release_groups(self._built.pop(number).context.transport.groups)
        gc.collect()
        if self._world.device.type == "cuda":
            torch.cuda.empty_cache()

    def _failure(self, number: int, error: Exception) -> TurnFailure:
        """Describe how this rank failed in the turn of a plan."""
        num_built = len({*self._built, number})
        lines = str(error).splitlines() or [""]
        failure = TurnFailure(self._world.rank, number, f"{type(error).__name__}: {lines[0]}", num_built)
        if not is_out_of_memory(error):
            return replace(failure, is_secondary=is_lost_peer(error))
        recipe, plan = self._turns.recipe, self._turns.plans[number]
        counted = _of_rank(plan_memory(recipe, plan, build_model_shape(recipe)), self._world.rank)
        return replace(failure, is_out_of_memory=True, held_bytes=self._held_bytes(), counted_bytes=counted.total)

    def _path(self, name: str) -> Path:
        return self._folder / name.format(rank=self._world.rank)


def counted_memory(recipe: Recipe, plan: Plan, context: RankContext, batch: BatchMeta) -> RankMemory:
    """Return what the memory model counts for this rank if no microbatch is larger than those of the batch."""
    largest: dict[str, TokenLoad] = {}
    for mb, load in step_loads(context.graph, batch).loads.items():
        if mb.unit not in largest or load.tokens > largest[mb.unit].tokens:
            largest[mb.unit] = load
    microbatches = {unit: LargestMicrobatch(**asdict(load)) for unit, load in largest.items()}
    of_batch = plan.model_copy(update={"data": plan.data.model_copy(update={"largest_microbatch": microbatches})})
    return _of_rank(plan_memory(recipe, of_batch, context.shape), context.world.rank)


def _of_rank(by_rank: Mapping[int, RankMemory], rank: int) -> RankMemory:
    """Return the memory of a rank; ranks of other replica groups hold what those of the first hold."""
    return by_rank.get(rank) or max(by_rank.values(), key=lambda memory: memory.total)
