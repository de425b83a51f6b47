"""Every mesh assignment of `unified` and `disaggregated` that the recipe allows.

On large clusters `disaggregated` has millions, which `allocation_order.py` lists from the fastest on.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain, product
from operator import or_
from typing import NamedTuple

from mmtrain.planning.artifact.layout import MeshSize, mesh_beside
from mmtrain.planning.artifact.plan import Placement
from mmtrain.planning.space.budget import DEFAULT_BUDGET, MeshBudget
from mmtrain.planning.space.candidate import MeshAssignment, UnitTimeBound
from mmtrain.planning.space.constraints import UnitChoices
from mmtrain.program.ir.graph import LLM

Choices = Mapping[str, UnitChoices]


@dataclass(frozen=True)
class MicrobatchRule:
    """How many microbatches a unit's replica has: a fixed number, or one for every `merged` of the LLM's."""

    fixed: int | None = None
    merged: int = 1

    def count(self, num_llm: int) -> int | None:
        """Return the number beside `num_llm` microbatches of an LLM replica; None where it does not divide."""
        if self.fixed is not None:
            return self.fixed
        return num_llm // self.merged if num_llm % self.merged == 0 else None


class BoundedUnitMesh(NamedTuple):
    """One mesh of one unit on ranks of its own, and the least seconds that it needs in a step."""

    bound_s: float
    mesh: MeshSize
    microbatches: MicrobatchRule


class UnitMeshes(NamedTuple):
    """A mesh for each of the first units, and the bound of the slowest of them."""

    bound_s: float
    chosen: tuple[BoundedUnitMesh, ...]


def has_replicated_mesh(choices: Choices, num_ranks: int) -> bool:
    """Return whether every unit may run whole on each of the ranks, or on each TP group of them."""
    return any(True for _ in replicated_meshes(choices, num_ranks))


def replicated_meshes(choices: Choices, num_ranks: int) -> Iterator[dict[str, MeshSize]]:
    """List the meshes of `replicated` on exactly `num_ranks` ranks, those with smaller TP groups first.

    All units have one tensor-parallel size, and each is whole on every TP group. Where replicas of the LLM share
    sequences, these come last, and each of them is a replica of the other units.
    """
    if not all(1 in unit.pp and unit.allows_chunks(1, 1) for unit in choices.values()):
        return
    for meshes in shared_meshes(choices):
        llm = meshes[LLM]
        if llm.ranks == num_ranks and all(mesh.tp == llm.tp for mesh in meshes.values()):
            yield meshes


def has_pipelined_meshes(
    choices: Choices, num_ranks: int, placement: Placement, budget: MeshBudget = DEFAULT_BUDGET.meshes
) -> bool:
    """Return whether `unified` or `disaggregated` has meshes of exactly `num_ranks` ranks; faster than listing them."""
    if placement == "unified":
        return any(True for _ in unified_assignments(choices, num_ranks))
    if len(choices) == 1:
        return False
    totals = 1
    for unit in choices.values():
        rank_counts = {mesh.ranks for mesh, _ in meshes_of(unit, num_ranks, choices[LLM], budget)}
        totals = _reachable_totals(totals, rank_counts)
    return bool(totals >> num_ranks & 1)


def unit_mesh_sizes(
    choices: Choices, unit: str, num_ranks: int, budget: MeshBudget = DEFAULT_BUDGET.meshes
) -> set[MeshSize]:
    """Return the meshes that a unit may have on up to `num_ranks` ranks of its own."""
    return {mesh for mesh, _ in meshes_of(choices[unit], num_ranks, choices[LLM], budget)}


def assignments_near_shares(
    choices: Choices, shares: Mapping[str, float], bound: UnitTimeBound, budget: MeshBudget = DEFAULT_BUDGET.meshes
) -> Iterator[list[MeshAssignment]]:
    """List `disaggregated` assignments by numbers of ranks, those nearest to `shares` (ranks by unit) first.

    For each combination of numbers of ranks: the assignments that are fastest by their bounds.
    """
    num_ranks = round(sum(shares.values()))
    units = []
    for unit in choices.values():
        meshes = meshes_of(unit, num_ranks, choices[LLM], budget)
        bounded = (BoundedUnitMesh(bound(unit.name, mesh, rule.fixed), mesh, rule) for mesh, rule in meshes)
        units.append(_by_ranks(entry for entry in bounded if entry.bound_s < math.inf))
    splits = ((*ranks, num_ranks - sum(ranks)) for ranks in product(*units[:-1]))
    possible = [ranks for ranks in splits if ranks[-1] in units[-1]]
    unit_shares = [shares[unit] for unit in choices]

    def distance(ranks: tuple[int, ...]) -> float:
        return sum(abs(actual - share) for actual, share in zip(ranks, unit_shares, strict=True))

    for ranks in sorted(possible, key=lambda ranks: (distance(ranks), ranks)):
        meshes_of_units = [by_ranks[n] for by_ranks, n in zip(units, ranks, strict=True)]
        combined = _combine(meshes_of_units, num_ranks, budget.num_first_assignments)
        combined = sorted(combined, key=lambda entry: entry.bound_s)
        assignments = (_disaggregated_assignment(choices, entry.chosen) for entry in combined)
        yield [assignment for assignment in assignments if assignment is not None]


def unified_assignments(choices: Choices, num_ranks: int) -> Iterator[MeshAssignment]:
    """List every mesh assignment of `unified`."""
    llm = choices[LLM]
    num_layers = sum(unit.num_layers for unit in choices.values())
    min_pp = max(min(unit.pp) for unit in choices.values())
    max_pp = sum(max(unit.pp) for unit in choices.values())
    for shared in shared_meshes(choices):
        mesh = shared[LLM]
        pp, rest = divmod(num_ranks, mesh.tp * mesh.num_replicas)
        if rest or not min_pp <= pp <= max_pp:
            continue
        num_llm = llm.global_batch // mesh.dp
        num_microbatches = {name: unit.fixed_microbatches or num_llm for name, unit in choices.items()}
        for vpp in _vpp_sizes(llm, pp, num_layers, num_llm, _pipeline_chunks(choices)):
            meshes = {name: replace(of_unit, pp=pp, vpp=vpp) for name, of_unit in shared.items()}
            if _can_interleave_together(choices, meshes[LLM]):
                yield MeshAssignment("unified", meshes, num_microbatches | {LLM: num_llm})


def shared_meshes(choices: Choices) -> Iterator[dict[str, MeshSize]]:
    """List the meshes of all units on one pipeline rank, those without context parallelism first."""
    llm = choices[LLM]
    plain = (MeshSize(tp, 1, dp) for tp, dp in product(sorted(llm.tp), sorted(llm.dp)) if 1 in llm.cp)
    of_tp_and_dp = (llm.context_meshes(MeshSize(tp, 1, dp)) for tp, dp in product(sorted(llm.tp), llm.dp))
    with_context = (mesh for meshes in of_tp_and_dp for mesh in meshes if mesh.cp > 1)
    for of_llm in llm.with_experts(chain(plain, with_context)):
        others = {name: _mesh_beside(unit, of_llm) for name, unit in choices.items() if name != LLM}
        meshes = {name: of_llm if name == LLM else others[name] for name in choices}
        possible = {name: mesh for name, mesh in meshes.items() if mesh is not None}
        if len(possible) == len(choices):
            yield possible


def _mesh_beside(unit: UnitChoices, of_llm: MeshSize) -> MeshSize | None:
    """Return the mesh of another unit on the LLM's ranks in one pipeline; None where it cannot have one.

    Where replicas of the LLM share sequences, each of them is a replica of the unit. Where the LLM's tensor-parallel
    size is not among an encoder's, it has a divisor of it, and so several replicas on each of the LLM's TP groups. Its
    replicas may then be more than the batch has groups, since the items of one group are divided among them.
    """
    tp = unit.tp_beside(of_llm.tp)
    if tp is None:
        return None
    mesh = mesh_beside(of_llm, tp)
    return mesh if mesh.dp in unit.dp or (mesh.dp > of_llm.dp and unit.fixed_dp is None) else None


def _can_interleave_together(choices: Choices, mesh: MeshSize) -> bool:
    """Return whether one pipeline of all units may have the mesh's model chunks on each rank."""
    if not all(unit.allows_chunks(mesh.pp, mesh.vpp) for unit in choices.values()):
        return False  # all units share the rounds over the ranks
    if mesh.vpp == 1 or len(choices) == 1:
        return True
    fixed_pp = {name: unit.pp[0] for name, unit in choices.items() if len(unit.pp) == 1 and not unit.is_whole}
    if not fixed_pp:
        return True
    if mesh.pp == 1 or fixed_pp.get(LLM) != mesh.pp:
        return False  # the LLM would span its ranks in one round only
    spans = [unit.spanned_chunks(mesh) for unit in choices.values()]
    least = sum(1 if span is None else span for span in spans)
    return least - (len(spans) - 1) <= mesh.pp * mesh.vpp  # a unit may begin in the chunk where another ends


def _pipeline_chunks(choices: Choices) -> int | None:
    """Return the model chunks of one pipeline of all units, where the recipe divides the layers of one of them."""
    return next((unit.num_chunks for unit in choices.values() if unit.num_chunks is not None), None)


def _vpp_sizes(unit: UnitChoices, pp: int, layers: int, num_microbatches: int, num_chunks: int | None) -> Iterator[int]:
    """List model chunks per rank: on one rank, or with fewer microbatches than ranks, more than one only cost time.

    num_chunks: of all ranks together, where the recipe divides the layers.
    """
    if num_chunks is not None:
        yield from (num_chunks // pp,) if num_chunks % pp == 0 else ()
        return
    for vpp in unit.vpp:
        is_useful = len(unit.vpp) == 1 or 1 < pp <= num_microbatches
        if vpp == 1 or (pp * vpp <= layers and is_useful):
            yield vpp


def meshes_of(
    unit: UnitChoices, max_ranks: int, llm: UnitChoices, budget: MeshBudget
) -> Iterator[tuple[MeshSize, MicrobatchRule]]:
    """List the meshes of a unit on up to `max_ranks` ranks of its own; `with_encoder_chunks` adds encoders' chunks."""
    merging = [MicrobatchRule(merged=merged) for merged in budget.merged_microbatches]
    fixed = MicrobatchRule(fixed=unit.fixed_microbatches)
    for tp, dp, pp in product(unit.own_tp, unit.dp, unit.pp):
        if tp * dp * pp > max_ranks:
            continue
        if unit.name == LLM:
            num_llm = llm.global_batch // dp
            rule = MicrobatchRule(fixed=num_llm)
            for vpp in _vpp_sizes(unit, pp, unit.num_layers, num_llm, unit.num_chunks):
                if pp * vpp <= unit.num_layers and unit.allows_chunks(pp, vpp):
                    meshes = unit.with_experts(unit.context_meshes(MeshSize(tp, pp, dp, vpp)))
                    yield from ((mesh, rule) for mesh in meshes if mesh.ranks <= max_ranks)
            continue
        vpp = unit.fixed_vpp_on(pp) or 1
        if pp * vpp <= unit.num_layers and unit.allows_chunks(pp, vpp):
            for rule in [fixed] if unit.fixed_microbatches else merging:
                yield MeshSize(tp, pp, dp, vpp), rule


def all_disaggregated(choices: Choices, num_ranks: int, budget: MeshBudget) -> Iterator[MeshAssignment]:
    """List every mesh assignment of `disaggregated`, with every number of model chunks that encoders may have."""
    if len(choices) == 1:
        return
    units = []
    for unit in choices.values():
        meshes = meshes_of(unit, num_ranks, choices[LLM], budget)
        units.append([BoundedUnitMesh(0.0, mesh, rule) for mesh, rule in meshes])
    for combined in _combine(units, num_ranks, None):
        assignment = _disaggregated_assignment(choices, combined.chosen)
        if assignment is not None:
            yield from with_encoder_chunks(choices, assignment, assignment.meshes.keys())


def in_flight_behind(assignment: MeshAssignment, unit: str) -> int:
    """Return how many microbatches of a unit are in flight at least in the pipelines that read from it, on other ranks.

    Behind an LLM of one chunk per rank, those are the ranks of the generator's pipeline. An interleaved LLM of P ranks
    hands over P microbatches at once, so P - 1 more wait.
    """
    llm, num_llm = assignment.meshes[LLM], assignment.num_microbatches[LLM]
    names = list(assignment.meshes)
    in_generators = sum(
        assignment.meshes[name].pp * num_llm // assignment.num_microbatches[name]
        for name in names[names.index(LLM) + 1 :]
    )
    behind_llm = in_generators + llm.pp - 1 if in_generators and llm.vpp > 1 else in_generators
    if unit == LLM:
        return min(behind_llm, num_llm)
    if unit not in names[: names.index(LLM)]:
        return 0
    return min(_in_flight(llm.pp, llm.vpp) + behind_llm, num_llm) * assignment.num_microbatches[unit] // num_llm


def _in_flight(depth: int, vpp: int) -> int:
    """Return the microbatches that an encoder's last stage has run forward before the LLM returns the first of them.

    An interleaved pipeline of P ranks begins 2 P - 1 of them before the first comes back: its warm-up has 2 (P - 1) +
    (V - 1) P passes, in rounds of P microbatches. And so that it need not wait, most of a round is ready beforehand,
    see `PipelinePosition.buffered_waves`.
    """
    return depth if vpp == 1 else 2 * depth - 1 + depth - depth // vpp - 1


def has_split_tp_group(assignment: MeshAssignment, ranks_per_node: int | None) -> bool:
    """Return whether a tensor-parallel group lies on two nodes."""
    return ranks_per_node is not None and assignment.tp_group_across_nodes(ranks_per_node) is not None


def _combine(units: Sequence[Sequence[BoundedUnitMesh]], num_ranks: int, limit: int | None) -> list[UnitMeshes]:
    """Choose a mesh for every unit so that they use `num_ranks` in all; the bound is that of the slowest.

    limit: after each unit, keep only the fastest `limit` choices among those that use the same number of ranks.
    """
    meshes_by_ranks: list[dict[int, list[BoundedUnitMesh]]] = []
    for meshes in units:
        by_ranks = _by_ranks(meshes)
        if limit is not None:
            by_ranks = {n: sorted(same, key=lambda entry: entry.bound_s)[:limit] for n, same in by_ranks.items()}
        meshes_by_ranks.append(by_ranks)
    reachable = [1]  # bit n: the units that follow may use n ranks together
    for by_ranks in reversed(meshes_by_ranks[1:]):
        reachable.append(_reachable_totals(reachable[-1], by_ranks.keys()))
    partial: dict[int, list[UnitMeshes]] = {0: [UnitMeshes(0.0, ())]}
    for by_ranks in meshes_by_ranks:
        rest = reachable.pop()
        pairs: dict[int, list[tuple[list[UnitMeshes], list[BoundedUnitMesh]]]] = {}
        for used, chosen in partial.items():
            for ranks, meshes in by_ranks.items():
                total = used + ranks
                if total <= num_ranks and rest >> (num_ranks - total) & 1:
                    pairs.setdefault(total, []).append((chosen, meshes))
        partial = {total: _joined(same_total, limit) for total, same_total in pairs.items()}
    return partial.get(num_ranks, [])


def _reachable_totals(totals: int, rank_counts: Set[int]) -> int:
    """Return numbers of ranks that units may use together, as bits, with one more unit that may use `rank_counts`."""
    return reduce(or_, (totals << ranks for ranks in rank_counts), 0)


def _by_ranks(meshes: Iterable[BoundedUnitMesh]) -> dict[int, list[BoundedUnitMesh]]:
    by_ranks: dict[int, list[BoundedUnitMesh]] = {}
    for entry in meshes:
        by_ranks.setdefault(entry.mesh.ranks, []).append(entry)
    return by_ranks


def _joined(pairs: Sequence[tuple[list[UnitMeshes], list[BoundedUnitMesh]]], limit: int | None) -> list[UnitMeshes]:
    """Append each mesh to each choice for the units before; with `limit`, keep the fastest, in the order of bounds."""
    if limit is None:
        return [entry for chosen, meshes in pairs for entry in _extend(chosen, meshes)]
    joined: list[UnitMeshes] = []
    pairs = sorted(pairs, key=lambda pair: max(pair[0][0].bound_s, pair[1][0].bound_s))
    for chosen, meshes in pairs:
        bound_s = max(chosen[0].bound_s, meshes[0].bound_s)
        if len(joined) == limit and bound_s >= joined[-1].bound_s:
            break  # all pairs that follow are no faster
        joined += _extend(*_fastest_parts(chosen, meshes, limit))
        joined = sorted(joined, key=lambda entry: entry.bound_s)[:limit]
    return joined


def _extend(chosen: Iterable[UnitMeshes], meshes: Sequence[BoundedUnitMesh]) -> list[UnitMeshes]:
    return [
        UnitMeshes(max(before.bound_s, entry.bound_s), (*before.chosen, entry)) for before in chosen for entry in meshes
    ]


def _fastest_parts(
    chosen: list[UnitMeshes], meshes: list[BoundedUnitMesh], limit: int
) -> tuple[list[UnitMeshes], list[BoundedUnitMesh]]:
    """Return as much of two sorted lists as holds the `limit` pairs with the least larger bound."""
    num_chosen = num_meshes = 1
    while num_chosen * num_meshes < limit and (num_chosen < len(chosen) or num_meshes < len(meshes)):
        is_exhausted = num_meshes == len(meshes)
        can_grow = num_chosen < len(chosen)
        if is_exhausted or (can_grow and chosen[num_chosen].bound_s <= meshes[num_meshes].bound_s):
            num_chosen += 1
        else:
            num_meshes += 1
    return chosen[:num_chosen], meshes[:num_meshes]


def microbatches_go_together(count: int, num_llm: int) -> bool:
    """Return whether a unit's microbatches can be cut or joined to those of an LLM replica."""
    return count % num_llm == 0 or num_llm % count == 0


def _disaggregated_assignment(choices: Choices, chosen: Sequence[BoundedUnitMesh]) -> MeshAssignment | None:
    """Give every unit its microbatches; None where an encoder's number does not go with the LLM's."""
    entries = dict(zip(choices, chosen, strict=True))
    num_llm = choices[LLM].global_batch // entries[LLM].mesh.dp
    num_microbatches = {}
    for unit, entry in entries.items():
        count = entry.microbatches.count(num_llm)
        if count is None:
            return None
        num_microbatches[unit] = count
    if not all(microbatches_go_together(count, num_llm) for count in num_microbatches.values()):
        return None
    return MeshAssignment("disaggregated", {unit: entry.mesh for unit, entry in entries.items()}, num_microbatches)


def lower_bound(bound: UnitTimeBound, assignment: MeshAssignment) -> float:
    """Return the least seconds of an assignment's step: one pipeline runs all units, else the slowest decides."""
    microbatches = assignment.pipeline_microbatches
    seconds = [bound(unit, mesh, microbatches[unit]) for unit, mesh in assignment.meshes.items()]
    return sum(seconds) if assignment.placement == "unified" else max(seconds)


def units_slow_to_fill(
    assignment: MeshAssignment, step_bound_s: float, bound: UnitTimeBound, budget: MeshBudget
) -> Set[str]:
    """Return the units whose pipelines take a share of the step to fill, which model chunks may save."""
    slow = set()
    for unit, mesh in assignment.meshes.items():
        fill_s = (mesh.pp - 1) * bound(unit, mesh, None) / assignment.num_microbatches[unit]
        if fill_s > budget.min_fill_share_for_chunks * step_bound_s:
            slow.add(unit)
    return slow


def with_encoder_chunks(choices: Choices, assignment: MeshAssignment, units: Set[str]) -> Iterator[MeshAssignment]:
    """List the assignment, and it with several model chunks per rank of the encoders among `units`.

    Only numbers of chunks that divide the encoder's blocks evenly are listed. They are variants of one assignment: all
    they do is to fill an encoder's pipeline sooner, so they do not count among those with one mesh of the LLM.
    """
    options = []
    for name, mesh in assignment.meshes.items():
        unit = choices[name]
        blocks = unit.num_layers - 2  # without the embedding of media and the projector
        is_open = (
            name != LLM
            and name in units
            and unit.num_chunks is None
            and 1 < mesh.pp <= assignment.num_microbatches[name]
        )
        even = [vpp for vpp in unit.vpp[1:] if is_open and blocks % (mesh.pp * vpp) == 0]
        options.append([mesh, *(replace(mesh, vpp=vpp) for vpp in even)])
    for meshes in product(*options):
        yield replace(assignment, meshes=dict(zip(assignment.meshes, meshes, strict=True)))
