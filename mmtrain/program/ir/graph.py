"""The stage graph: which ranks hold which stage of which unit, and what flows between stages.

A *TP group* is the tuple of global ranks that hold one stage of one replica: its tensor-parallel group. *Replica
groups* are the smallest sets of replicas that exchange data only with each other: with g = gcd of all units'
data-parallel degrees and n_u replicas of unit u, group q holds replicas [q * n_u / g, (q + 1) * n_u / g) of every unit.
Replicas that hold experts together are in one group, which may therefore be larger.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from mmtrain.errors import ProgramError

LLM = "llm"  # the unit whose first and last stage may share an embedding matrix
# What is balanced over the replicas of sharded units: every unit's work by itself, the LLM's alone, or nothing.
DispatchMode = Literal["all", "llm", "none"]
Exchange = Literal["all_to_all", "all_gather"]  # the collective by which replicas dispatch rows
# How the ranks of a context-parallel group attend to each other's tokens: each takes some of the heads of all tokens,
# or keys and values go round.
ContextMethod = Literal["ulysses", "ring"]
CutSequences = Literal["auto", "even"]  # which sequences are cut: as few as balance asks for, or all


# Stages and microbatches are the keys of most dictionaries of the planner, and tuples are hashed and compared without a
# call of Python. Their own `index` hides that of tuples, which is of no use for them.
class StageId(NamedTuple):
    """A stage: the `index`-th slice of consecutive layers of `unit`. Prints as `llm.1`."""

    unit: str
    index: int  # type: ignore[assignment]

    def __str__(self) -> str:
        return f"{self.unit}.{self.index}"


class Microbatch(NamedTuple):
    """One microbatch of one replica of a unit. Prints as `llm:0.3` (unit:replica.index)."""

    unit: str
    replica: int
    index: int  # type: ignore[assignment]

    def __str__(self) -> str:
        return f"{self.unit}:{self.replica}.{self.index}"


@dataclass(frozen=True)
class UnitMesh:
    """A unit's `tp x cp x pp x dp` over its list of global ranks, tp fastest, then cp, then dp, then pp.

    A replica is one copy of the unit's weights. With context parallelism (`cp` above 1) `cp` consecutive replicas share
    the sequences of every microbatch: each computes some of the tokens, and all exchange what attention needs. With
    expert parallelism (`ep` above 1) each of `ep` consecutive replicas holds some experts of every block, and all
    exchange tokens inside it.
    `num_microbatches` counts each replica's microbatches in one step. With `shard` the replicas hold the unit together,
    each `shard` of them one copy, and every forward and backward exchanges weights and gradients; with `dispatch` "all"
    any replica may compute an item, and a collective of all replicas, `exchange`, moves what it becomes. With `vpp`
    model chunks the stages go round the pipeline ranks `vpp` times: stage s is chunk s // pp of pipeline rank s % pp.
    The last round may end early.
    """

    unit: str
    tp: int
    pp: int
    dp: int
    ranks: tuple[int, ...]
    num_microbatches: int
    vpp: int = 1
    shard: int | None = None
    keeps_weights: bool = False  # with `shard`: gathered once a step, until its last backward (ZeRO-2)
    dispatch: DispatchMode | None = None
    exchange: Exchange = "all_to_all"
    cp: int = 1
    cp_method: ContextMethod = "ulysses"
    cp_split: CutSequences = "auto"
    tp_chunks: int = 1  # of the tokens in linears of blocks, so that TP communication overlaps with GEMMs
    ep: int = 1  # consecutive replicas that hold the experts of each block together

    @property
    def num_replicas(self) -> int:
        """Return the number of copies of the unit's weights, over which gradients are summed and ZeRO-1 shards."""
        return self.dp * self.cp

    def cp_replicas(self, replica: int) -> range:
        """Return the replicas that share the sequences of `replica`'s microbatches, itself among them."""
        first = replica // self.cp * self.cp
        return range(first, first + self.cp)

    def joint_replicas(self, replica: int) -> range:
        """Return the replicas that run a pass together, `replica` among them: they share sequences, or experts."""
        if self.shard is not None:
            return range(self.num_replicas)
        together = math.lcm(self.cp, self.ep)
        first = replica // together * together
        return range(first, first + together)

    def tp_group(self, stage: int, replica: int) -> tuple[int, ...]:
        """Return the global ranks of the TP group that holds the unit's stage number `stage` of `replica`."""
        first = (stage % self.pp * self.num_replicas + replica) * self.tp
        return self.ranks[first : first + self.tp]


def num_independent_groups(dp: int, cp: int, ep: int) -> int:
    """Return into how many groups a unit's replicas fall that share neither sequences nor experts with each other."""
    return dp * cp // math.lcm(cp, ep)


def microbatches_per_block(count: int, other: int) -> tuple[int, int]:
    """Return how many microbatches of each of two units make up the smallest block that both fill.

    A step has `count` microbatches of a replica of one unit, and `other` of one of the other; see `StageGraph.sources`.
    """
    num_blocks = math.gcd(count, other)
    return count // num_blocks, other // num_blocks


@dataclass(frozen=True)
class Stage:
    """Consecutive layers [lo, hi) of one unit; `tp_groups[replica]` are the ranks that hold them."""

    id: StageId
    layers: tuple[int, int]
    tp_groups: tuple[tuple[int, ...], ...]
    trainable: bool  # holds a trainable parameter
    recompute: frozenset[int] = frozenset()  # layers whose activations do not stay on the device
    pieces: tuple[int, ...] = ()  # by layer: its segments, where layers can be cut too; empty: a segment is a layer
    sp: bool = False  # sequence parallelism: between GEMMs each rank of a TP group holds a slice of the tokens
    # The forward keeps nothing for the backward, which begins with another forward; else activations are kept.
    reruns_forward: bool = False
    # Layers, counted from the stage's first, at which the buckets start whose gradients are reduced together.
    bucket_starts: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Edge:
    """Data from the output of stage `src` into stage `dst`. Prints as `vision.0>llm.0`.

    Inside a unit a microbatch passes 1:1. Between units the route of the step says which items go where.
    """

    src: StageId
    dst: StageId

    @property
    def crosses_units(self) -> bool:
        """Whether the edge is between units (N:M, ragged) or inside a pipeline (1:1)."""
        return self.src.unit != self.dst.unit

    def __hash__(self) -> int:  # one hash instead of four: programs of 100,000 messages are sets of edges
        return hash((self.src.unit, self.src.index, self.dst.unit, self.dst.index))

    def __str__(self) -> str:
        return f"{self.src}>{self.dst}"


@dataclass(frozen=True)
class StageGraph:
    """Stages, the edges between them, and the meshes they come from."""

    meshes: tuple[UnitMesh, ...]
    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    tied_embeddings: bool = False  # the LLM's first and last stage share one matrix
    # Encoders run all their forwards before the LLM's first and all their backwards after its last.
    encoder_first: bool = False

    def mesh(self, unit: str) -> UnitMesh:
        """Return the mesh of `unit`."""
        return self._meshes[unit]

    def stage(self, stage_id: StageId) -> Stage:
        """Return the stage called `stage_id`."""
        return self._stages[stage_id]

    def has_stage(self, stage_id: StageId) -> bool:
        """Return whether there is a stage called `stage_id`."""
        return stage_id in self._stages

    def inputs(self, stage_id: StageId) -> tuple[Edge, ...]:
        """Return the edges that enter the stage."""
        return self._edges_into[stage_id]

    def outputs(self, stage_id: StageId) -> tuple[Edge, ...]:
        """Return the edges that leave the stage."""
        return self._edges_from[stage_id]

    def tp_group(self, stage_id: StageId, replica: int) -> tuple[int, ...]:
        """Return the global ranks that hold the stage for `replica`, in tensor-parallel order."""
        return self._stages[stage_id].tp_groups[replica]

    @cached_property
    def order(self) -> tuple[StageId, ...]:
        """Stages in topological order: every source before its destinations, else as they are listed.

        Raises:
            ProgramError: the edges form a cycle.
        """
        num_missing = {s.id: len(self.inputs(s.id)) for s in self.stages}
        place = {s.id: number for number, s in enumerate(self.stages)}
        ready = [sid for sid, missing in num_missing.items() if not missing]
        done: list[StageId] = []
        while ready:  # round by round: all whose sources came in the rounds before
            done += ready
            released: list[StageId] = []
            for edge in (edge for sid in ready for edge in self.outputs(sid)):
                num_missing[edge.dst] -= 1
                if not num_missing[edge.dst]:
                    released.append(edge.dst)
            ready = sorted(released, key=place.__getitem__)
        if len(done) < len(self.stages):
            stages = ", ".join(str(sid) for sid, missing in num_missing.items() if missing)
            raise ProgramError(f"stage graph: the edges among stages {stages} form a cycle; remove one of them")
        return tuple(done)

    @cached_property
    def num_groups(self) -> int:
        """Number of replica groups."""
        return math.gcd(*(num_independent_groups(mesh.dp, mesh.cp, mesh.ep) for mesh in self.meshes))

    @cached_property
    def all_ranks(self) -> tuple[int, ...]:
        """Ranks that hold a stage, ascending."""
        return tuple(sorted({rank for stage in self.stages for tp_group in stage.tp_groups for rank in tp_group}))

    @cached_property
    def world_size(self) -> int:
        """Number of ranks that hold a stage."""
        return len({r for m in self.meshes for r in m.ranks})

    @cached_property
    def is_sharded(self) -> bool:
        """Whether replicas hold units together, so that all of them run every forward and backward."""
        return any(mesh.shard is not None for mesh in self.meshes)

    @property
    def encoders(self) -> tuple[str, ...]:
        """Names of the units that feed the LLM, in the order of the meshes."""
        feeding = {edge.src.unit for edge in self.edges if edge.crosses_units and edge.dst.unit == LLM}
        return tuple(mesh.unit for mesh in self.meshes if mesh.unit in feeding)

    @cached_property
    def dispatches_items(self) -> bool:
        """Whether any replica of an encoder may compute an item."""
        return any(mesh.dispatch == "all" for mesh in self.meshes)

    def dispatches(self, edge: Edge) -> bool:
        """Return whether rows flow along the edge by collectives of all replicas (`Dispatch`), not by messages."""
        return edge.crosses_units and self.mesh(edge.src.unit).dispatch == "all"

    def group_of(self, mb: Microbatch) -> int:
        """Return the replica group that the microbatch belongs to."""
        return mb.replica // self._replicas_per_group[mb.unit]

    def shift(self, mb: Microbatch, group: int) -> Microbatch:
        """Return replica group 0's microbatch as another replica group has it."""
        return Microbatch(mb.unit, mb.replica + group * self._replicas_per_group[mb.unit], mb.index)

    @cached_property
    def _replicas_per_group(self) -> dict[str, int]:
        return {mesh.unit: mesh.num_replicas // self.num_groups for mesh in self.meshes}

    def sources(self, edge: Edge, mb: Microbatch) -> tuple[Microbatch, ...]:
        """Return the microbatches whose output may flow along `edge` into the destination's microbatch `mb`.

        Inside a unit that is the same microbatch. Between units with n and m microbatches a replica, data moves in
        gcd(n, m) blocks: any item of a block's source microbatches, of every replica of the group, may go to any
        destination microbatch of that block. So a unit with 1/k of another's microbatches merges k of them, and a unit
        with k times as many splits each.
        """
        return self._block(edge.src.unit, mb)

    def destinations(self, edge: Edge, mb: Microbatch) -> tuple[Microbatch, ...]:
        """Return the microbatches that the source's microbatch `mb` may feed along `edge`; see `sources`."""
        return self._block(edge.dst.unit, mb)

    def _block(self, unit: str, mb: Microbatch) -> tuple[Microbatch, ...]:
        if unit == mb.unit:
            return (mb,)
        if (unit, mb) not in self._blocks:
            self._blocks[unit, mb] = self._list_block(unit, mb)
        return self._blocks[unit, mb]

    def _list_block(self, unit: str, mb: Microbatch) -> tuple[Microbatch, ...]:
        per_own_block, per_block = microbatches_per_block(
            self.mesh(mb.unit).num_microbatches, self.mesh(unit).num_microbatches
        )
        index = mb.index // per_own_block * per_block
        per_group = self._replicas_per_group[unit]
        replica = self.group_of(mb) * per_group
        return tuple(
            Microbatch(unit, r, i) for i in range(index, index + per_block) for r in range(replica, replica + per_group)
        )

    def has_loss(self, stage_id: StageId) -> bool:
        """Return whether the stage computes a loss.

        The LLM's last stage does, even if it feeds a unit, and so does every end of a path through the graph. A unit
        after the LLM (an image generator) has a loss of its own; the LLM's last backward then waits for both.
        """
        llm = [s.id for s in self.stages if s.id.unit == LLM]
        return not self.outputs(stage_id) or (bool(llm) and stage_id == max(llm, key=lambda s: s.index))

    def needs_backward(self, stage_id: StageId) -> bool:
        """Return whether the stage has a backward: something trainable lies in it or upstream of it."""
        return self._backward[stage_id]

    def reruns_forward(self, stage_id: StageId) -> bool:
        """Return whether the stage's backward begins with another forward, since the first one kept nothing for it."""
        return self._stages[stage_id].reruns_forward and self.needs_backward(stage_id)

    def carries_gradient(self, edge: Edge) -> bool:
        """Return whether gradients flow back along the edge: its source needs a backward."""
        return self._backward[edge.src]

    def ranks_at(self, stage_id: StageId, position: int) -> tuple[int, ...]:
        """Return the ranks at one place in the TP groups of all replicas of a stage, which reduce its gradients."""
        key = (stage_id, position)
        if key not in self._ranks_at:
            self._ranks_at[key] = tuple([tp_group[position] for tp_group in self._stages[stage_id].tp_groups])
        return self._ranks_at[key]

    def only(self, units: Collection[str]) -> "StageGraph":
        """Return the stage graph of some units by themselves."""
        return replace(
            self,
            meshes=tuple(m for m in self.meshes if m.unit in units),
            stages=tuple(s for s in self.stages if s.id.unit in units),
            edges=tuple(e for e in self.edges if {e.src.unit, e.dst.unit} <= set(units)),
        )

    def ranks_holding(self, stage_id: StageId) -> tuple[int, ...]:
        """Return the ranks that hold the stage for any replica, TP group after TP group."""
        return tuple(rank for tp_group in self._stages[stage_id].tp_groups for rank in tp_group)

    def held_by(self, rank: int) -> list[tuple[StageId, int]]:
        """Return the stages on `rank` with the replica it holds of each, sources before destinations."""
        return self._held.get(rank, [])

    @cached_property
    def _held(self) -> dict[int, list[tuple[StageId, int]]]:
        held: dict[int, list[tuple[StageId, int]]] = {}
        for sid in self.order:
            for replica, tp_group in enumerate(self.stage(sid).tp_groups):
                for rank in tp_group:
                    held.setdefault(rank, []).append((sid, replica))
        return held

    @cached_property
    def _blocks(self) -> dict[tuple[str, Microbatch], tuple[Microbatch, ...]]:
        """Cache of `sources` and `destinations` between units: every message of a block asks for it."""
        return {}

    @cached_property
    def _ranks_at(self) -> dict[tuple[StageId, int], tuple[int, ...]]:
        return {}

    @cached_property
    def _meshes(self) -> dict[str, UnitMesh]:
        return {m.unit: m for m in self.meshes}

    @cached_property
    def _stages(self) -> dict[StageId, Stage]:
        return {s.id: s for s in self.stages}

    @cached_property
    def _edges_into(self) -> dict[StageId, tuple[Edge, ...]]:
        entering: dict[StageId, list[Edge]] = {s.id: [] for s in self.stages}
        for edge in self.edges:
            entering[edge.dst].append(edge)
        return {sid: tuple(edges) for sid, edges in entering.items()}

    @cached_property
    def _edges_from(self) -> dict[StageId, tuple[Edge, ...]]:
        leaving: dict[StageId, list[Edge]] = {s.id: [] for s in self.stages}
        for edge in self.edges:
            leaving[edge.src].append(edge)
        return {sid: tuple(edges) for sid, edges in leaving.items()}

    @cached_property
    def _backward(self) -> dict[StageId, bool]:
        known: dict[StageId, bool] = {}
        for sid in self.order:
            known[sid] = self.stage(sid).trainable or any(known[e.src] for e in self.inputs(sid))
        return known
