"""The `disaggregated` mesh assignments of one number of ranks, one after another in the order of their estimates.

Large clusters have millions. Which of them are fast is a question of three kinds of figures: the seconds of each unit's
work on its mesh, how many ranks that takes, and how long a microbatch is on its way through the units before, while a
unit waits for its first one and after its last one. All work of a step is done when the slowest unit is done, so

    step = max over units of (way through the units before, there and back + the unit's own part)

Work is by arithmetic, without regard to memory, until an assignment's turn comes. What each unit must recompute to fit
is worked out then, and decides about its place.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count, islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mmtrain.planning.artifact.layout import MeshSize
from mmtrain.planning.layer_costs.layer_costs import FloatArray, IntArray
from mmtrain.planning.search.mesh_enumeration import (
    Choices,
    has_split_tp_group,
    in_flight_behind,
    meshes_of,
    microbatches_go_together,
)
from mmtrain.planning.space.budget import MeshBudget
from mmtrain.planning.space.candidate import MeshAssignment
from mmtrain.planning.space.recently_used import RecentlyUsed
from mmtrain.program.ir.graph import LLM

MAX_MESHES_OF_MANY_UNITS = 4  # of each number of ranks, where three or more units are beside the LLM; by hand
# Choices of other units' meshes that are kept beside one mesh of the LLM. Of OrchMLLM's 84B on 2,560 GPUs all of them
# took 88 MB in each of two searches, and almost none has its turn.
NUM_FIRST_CHOICES = 4096
CHOICES_GROWTH = 16  # how many times as many are kept where all of these had their turn
MAX_KEPT_CHOICES = 1_000_000  # beside one number of the LLM's replicas, until another mesh leaves as many ranks
Int32Array = npt.NDArray[np.int32]
FORWARD_SHARE = 1 / 3  # of a layer's work; a backward computes two products for each of its forward's
FittedSeconds = Callable[[str, MeshSize, int, int], float]  # the last: microbatches in flight on ranks behind
UnitSeconds = Callable[[str, MeshSize, int], float]  # of a unit on a mesh, with so many microbatches of a replica


class _Pass(NamedTuple):
    """A unit's part of a step on each of its meshes: arrays of (n,)."""

    work_s: FloatArray  # of a rank in the whole step
    round_trip_s: FloatArray  # in which one microbatch passes all of the unit's layers, there and back


@dataclass(frozen=True)
class _LlmPass:
    """The LLM's part of a step on one mesh."""

    mesh: MeshSize
    num_microbatches: int
    work_s: float
    round_trip_s: float

    def step_seconds(self, before: Sequence[_Pass], after: Sequence[_Pass]) -> FloatArray:
        """Return (n,) seconds of a step in which other units work before and after the LLM.

        Every unit does its work, once its first microbatch has come and until its last one has gone back. The LLM also
        waits where microbatches turn round: its last rank has one forward to do until the first comes back, and one
        backward until the last does. An interleaved LLM of P ranks takes and hands over P microbatches one chunk apart,
        which slower units keep waiting.
        """
        pass_s = self.work_s / self.num_microbatches
        apart_s = pass_s / self.mesh.vpp
        others_in_round = self.mesh.pp - 1 if self.mesh.vpp > 1 else 0
        start_s = step_s = late_s = turn_s = np.zeros_like((*before, *after)[0].work_s)
        for unit in before:
            of_microbatch_s = unit.work_s / self.num_microbatches
            step_s = np.maximum(step_s, unit.work_s)
            start_s = np.maximum(start_s, unit.round_trip_s)
            late_s = np.maximum(late_s, others_in_round * np.maximum(0.0, of_microbatch_s - apart_s))
        for unit in after:
            of_microbatch_s = unit.work_s / self.num_microbatches
            step_s = np.maximum(step_s, start_s + self.round_trip_s + unit.work_s)
            first_s = np.maximum(0.0, of_microbatch_s - FORWARD_SHARE * pass_s)
            last_s = np.maximum(0.0, of_microbatch_s - (1 - FORWARD_SHARE) * pass_s)
            in_round_s = others_in_round * np.maximum(0.0, of_microbatch_s - apart_s)
            turn_s = np.maximum(turn_s, first_s + last_s + in_round_s)
        return np.asarray(np.maximum(step_s, start_s + self.work_s + late_s + turn_s))


@dataclass(frozen=True)
class StepEstimate:
    """What assignments are ordered by."""

    work: UnitSeconds  # a unit's own part of a step
    fitting: FittedSeconds  # the same with what memory makes it recompute; infinite where it cannot fit
    round_trip: UnitSeconds  # in which one microbatch passes a unit, there and back

    def step_seconds(self, assignment: MeshAssignment) -> float:
        """Return the seconds of a step with what memory makes each unit recompute; infinite where one cannot fit."""
        counts = assignment.num_microbatches
        passes = {}
        for unit, mesh in assignment.meshes.items():
            work_s = self.fitting(unit, mesh, counts[unit], in_flight_behind(assignment, unit))
            if math.isinf(work_s):
                return math.inf
            passes[unit] = _Pass(np.array([work_s]), np.array([self.round_trip(unit, mesh, counts[unit])]))
        place = list(passes).index(LLM)
        work_s, round_trip_s = (float(seconds[0]) for seconds in passes.pop(LLM))
        llm = _LlmPass(assignment.meshes[LLM], counts[LLM], work_s, round_trip_s)
        units = list(passes.values())
        return float(llm.step_seconds(units[:place], units[place:])[0])


@dataclass(frozen=True)
class _UnitMeshes:
    """The meshes that a unit may have beside an LLM with one number of microbatches: arrays of (n,), by ranks."""

    meshes: Sequence[tuple[MeshSize, int]]  # with the microbatches of a replica
    ranks: IntArray
    work_s: FloatArray
    round_trip_s: FloatArray

    @classmethod
    def of(cls, unit: str, meshes: Sequence[tuple[MeshSize, int]], estimate: StepEstimate) -> "_UnitMeshes":
        """Work out the seconds of each mesh."""
        by_ranks = sorted(meshes, key=lambda entry: entry[0].ranks)
        return cls(
            by_ranks,
            np.array([mesh.ranks for mesh, _ in by_ranks], dtype=np.int64),
            np.array([estimate.work(unit, mesh, count) for mesh, count in by_ranks]),
            np.array([estimate.round_trip(unit, mesh, count) for mesh, count in by_ranks]),
        )

    @cached_property
    def fastest_of_ranks(self) -> IntArray:
        """The indices of the few fastest meshes of each number of ranks."""
        fastest_first = np.lexsort((self.work_s, self.ranks))
        ranks = self.ranks[fastest_first]
        place = np.arange(len(ranks)) - np.searchsorted(ranks, ranks, "left")
        return np.sort(fastest_first[place < MAX_MESHES_OF_MANY_UNITS])


@dataclass(frozen=True)
class _Beside:
    """The meshes of all units but the LLM, beside an LLM with one number of microbatches."""

    units: Sequence[_UnitMeshes]
    num_before: int  # units that the LLM reads from; those that read from it follow

    @cached_property
    def least_rank_seconds(self) -> float:
        """Rank-seconds of their work on the most efficient meshes."""
        return sum(float((unit.work_s * unit.ranks).min()) for unit in self.units)

    @cached_property
    def least_round_trip_s(self) -> float:
        """Seconds of a microbatch's way through the units before the LLM, on the meshes where that is shortest."""
        return max((float(unit.round_trip_s.min()) for unit in self.units[: self.num_before]), default=0.0)

    def joined(self, num_ranks: int) -> list[Int32Array]:
        """Return for every choice of meshes that use so many ranks together, by unit, the index of its mesh.

        Several meshes of the LLM leave as many ranks, so the choices are listed once.
        """
        return self._joined.get(num_ranks, partial(self._join, num_ranks))

    @cached_property
    def _joined(self) -> RecentlyUsed[list[Int32Array]]:
        """Cache of `joined`."""
        return RecentlyUsed(MAX_KEPT_CHOICES, lambda chosen: len(chosen[0]))

    def _join(self, num_ranks: int) -> list[Int32Array]:
        first, *others = self.units
        chosen = [np.arange(len(first.ranks)) if len(others) < 2 else first.fastest_of_ranks]
        used = first.ranks[chosen[0]]
        for unit in others[:-1]:
            few = unit.fastest_of_ranks
            chosen = [*(np.repeat(index, len(few)) for index in chosen), np.tile(few, len(used))]
            used = np.repeat(used, len(few)) + unit.ranks[chosen[-1]]
        if not others:
            return [index[used == num_ranks].astype(np.int32) for index in chosen]
        ranks = others[-1].ranks
        lowest = np.searchsorted(ranks, num_ranks - used, "left")
        num_partners = np.searchsorted(ranks, num_ranks - used, "right") - lowest
        number_of_run = np.arange(num_partners.sum()) - np.repeat(np.cumsum(num_partners) - num_partners, num_partners)
        chosen = [
            *(np.repeat(index, num_partners) for index in chosen),
            np.repeat(lowest, num_partners) + number_of_run,
        ]
        return [index.astype(np.int32) for index in chosen]

    def passes(self, chosen: Sequence[Int32Array]) -> tuple[list[_Pass], list[_Pass]]:
        """Return what units before and after the LLM do in a step, for every choice of meshes."""
        passes = [
            _Pass(unit.work_s[index], unit.round_trip_s[index]) for unit, index in zip(self.units, chosen, strict=True)
        ]
        return passes[: self.num_before], passes[self.num_before :]


@dataclass(frozen=True)
class _Llm:
    """A mesh of the LLM, whose turn comes once before its memory is looked at and once after."""

    mesh: MeshSize
    beside: _Beside
    seconds: float
    is_fitted: bool = False


@dataclass
class _Choices:
    """The fastest choices of other units' meshes beside one mesh of the LLM, the fastest first.

    A large cluster has millions of choices, and few of them have their turn.
    """

    llm: _Llm
    chosen: Int32Array  # (units, n) of each unit, the number of its mesh
    step_s: FloatArray  # (n,)
    num_left_out: int  # slower choices
    num_done: int = 0


class _Chosen(NamedTuple):
    """A mesh of the LLM with one choice of the others, which waits for its turn; an assignment takes more memory."""

    llm: _Llm
    indices: tuple[int, ...]  # of each other unit, the number of its mesh


def ordered_assignments(
    choices: Choices,
    num_ranks: int,
    estimate: StepEstimate,
    budget: MeshBudget,
    ranks_per_node: int | None = None,
) -> Iterator[tuple[float, MeshAssignment]]:
    """Yield the assignments that may fit on exactly `num_ranks` ranks with their estimated seconds, which ascend.

    Of those with one mesh of the LLM, only the fastest `max_assignments_per_llm_mesh` are among them, so that not all
    differ in an encoder alone. ranks_per_node: leave out those whose tensor-parallel groups lie on two nodes.
    """
    if len(choices) == 1:
        return
    queue: list[tuple[float, int, _Llm | _Choices | _Chosen]] = []
    numbers = count()

    def push(seconds: float, entry: _Llm | _Choices | _Chosen) -> None:
        if seconds < math.inf:
            heapq.heappush(queue, (seconds, next(numbers), entry))

    num_yielded = Counter[MeshSize]()
    for llm in _llm_meshes(choices, num_ranks, estimate, budget):
        push(_least_step_seconds(llm, num_ranks), llm)
    while queue:
        seconds, _, entry = heapq.heappop(queue)
        if isinstance(entry, _Chosen):
            if num_yielded[entry.llm.mesh] < budget.max_assignments_per_llm_mesh:
                num_yielded[entry.llm.mesh] += 1
                yield seconds, _assignment(entry, choices)
        elif isinstance(entry, _Llm) and not entry.is_fitted:
            num_llm = choices[LLM].global_batch // entry.mesh.dp
            fitted = replace(entry, seconds=estimate.fitting(LLM, entry.mesh, num_llm, 0), is_fitted=True)
            push(max(seconds, _least_step_seconds(fitted, num_ranks)), fitted)
        elif isinstance(entry, _Llm):
            with_others = _with_others(entry, num_ranks - entry.mesh.ranks, choices, estimate, NUM_FIRST_CHOICES)
            if len(with_others.step_s):
                push(float(with_others.step_s[0]), with_others)
        elif num_yielded[entry.llm.mesh] < budget.max_assignments_per_llm_mesh:
            chosen = _Chosen(entry.llm, tuple(entry.chosen[:, entry.num_done].tolist()))
            num_done = entry.num_done + 1
            if num_done == len(entry.step_s) and entry.num_left_out:
                others = num_ranks - entry.llm.mesh.ranks
                entry = _with_others(entry.llm, others, choices, estimate, num_done * CHOICES_GROWTH)
            entry.num_done = num_done
            if num_done < len(entry.step_s):
                push(float(entry.step_s[num_done]), entry)
            assignment = _assignment(chosen, choices)
            if not has_split_tp_group(assignment, ranks_per_node):
                push(max(seconds, estimate.step_seconds(assignment)), chosen)


def most_split_assignments(choices: Choices, num_ranks: int, budget: MeshBudget) -> Iterator[MeshAssignment]:
    """List the `disaggregated` assignments that split units into most parts, whether or not they fit."""

    def share(_: str, mesh: MeshSize, __: int) -> float:
        return 1 / (mesh.tp * mesh.pp)

    by_share = StepEstimate(share, lambda unit, mesh, count, _: share(unit, mesh, count), lambda *_: 0.0)
    ordered = ordered_assignments(choices, num_ranks, by_share, budget)
    return (assignment for _, assignment in islice(ordered, budget.num_first_assignments))


def _llm_meshes(choices: Choices, num_ranks: int, estimate: StepEstimate, budget: MeshBudget) -> Iterator[_Llm]:
    """List the meshes of the LLM with what other units may have beside them."""
    llm = choices[LLM]
    names = list(choices)
    others = [(name, list(meshes_of(choices[name], num_ranks - 1, llm, budget))) for name in names if name != LLM]
    by_dp: dict[int, list[MeshSize]] = {}
    for mesh, _ in meshes_of(llm, num_ranks - len(others), llm, budget):
        by_dp.setdefault(mesh.dp, []).append(mesh)
    for dp, meshes in by_dp.items():
        num_llm = llm.global_batch // dp
        units = []
        for name, of_unit in others:
            counted = ((mesh, rule.count(num_llm)) for mesh, rule in of_unit)
            possible = [
                (mesh, num) for mesh, num in counted if num is not None and microbatches_go_together(num, num_llm)
            ]
            units.append(_UnitMeshes.of(name, possible, estimate))
        if all(len(unit.meshes) for unit in units):
            beside = _Beside(units, names.index(LLM))
            yield from (_Llm(mesh, beside, estimate.work(LLM, mesh, num_llm)) for mesh in meshes)


def _least_step_seconds(llm: _Llm, num_ranks: int) -> float:
    """Return the seconds of a step with this mesh of the LLM, if others shared all other ranks as if divisible."""
    of_others_s = llm.beside.least_rank_seconds / (num_ranks - llm.mesh.ranks)
    return max(llm.beside.least_round_trip_s + llm.seconds, of_others_s)


def _with_others(llm: _Llm, num_ranks: int, choices: Choices, estimate: StepEstimate, max_choices: int) -> _Choices:
    """Return the fastest choices of other units' meshes that use all ranks that the LLM leaves."""
    chosen = llm.beside.joined(num_ranks)
    num_llm = choices[LLM].global_batch // llm.mesh.dp
    llm_pass = _LlmPass(llm.mesh, num_llm, llm.seconds, estimate.round_trip(LLM, llm.mesh, num_llm))
    step_s = llm_pass.step_seconds(*llm.beside.passes(chosen))
    fastest = np.argsort(step_s, kind="stable")[:max_choices]
    num_left_out = len(step_s) - len(fastest)
    return _Choices(llm, np.stack([index[fastest] for index in chosen]), step_s[fastest], num_left_out)


def _assignment(chosen: _Chosen, choices: Choices) -> MeshAssignment:
    """Return the mesh assignment of a choice."""
    llm, beside = chosen.llm.mesh, chosen.llm.beside
    of_units = [unit.meshes[index] for unit, index in zip(beside.units, chosen.indices, strict=True)]
    of_units.insert(beside.num_before, (llm, choices[LLM].global_batch // llm.dp))
    meshes = {name: mesh for name, (mesh, _) in zip(choices, of_units, strict=True)}
    counts = {name: num for name, (_, num) in zip(choices, of_units, strict=True)}
    return MeshAssignment("disaggregated", meshes, counts)
