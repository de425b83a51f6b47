"""Greedy answers by the units of a plan, for a model that need not fit one process.

*Reading* is the forward program of the whole graph over a batch of prompts, laid out like a batch of training: encoders
turn every item into features once, brokers bring those where they belong, and each stage of the LLM remembers keys and
values. *Writing* is the forward program of the LLM alone, over one new token of every answer that has not ended. The
last stage picks the token; it travels back along the replica's pipeline. A replica has as many microbatches as pipeline
ranks, so that all of these have work while a token is on its way; replicas do not wait for each other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.checkpoint import Checkpoint
from mmtrain.costs import TokenLoad
from mmtrain.data import ChatTokenizer, PayloadNeed, StepData
from mmtrain.models import parameter_specs as params
from mmtrain.models.kv_cache import KVCache
from mmtrain.models.megatron import tp_group_scope
from mmtrain.models.model_shape import ModelShape, build_model_shape
from mmtrain.models.named_shards import NamedShard
from mmtrain.models.stage_inputs import TextInput
from mmtrain.plan.artifact.plan import UnitPlan
from mmtrain.plan.artifact.plan_graph import build_stage_graph
from mmtrain.program import LLM, Microbatch, Program, StageGraph, StageId, Step, StepLoads, build_program, step_loads
from mmtrain.program.verify.send_window import send_window
from mmtrain.recipe import Recipe
from mmtrain.runtime.execution.activity import Activity
from mmtrain.runtime.execution.broker import Broker
from mmtrain.runtime.execution.channel_probe import probe_channels
from mmtrain.runtime.execution.executor import Executor, StepInput
from mmtrain.runtime.execution.precision import compute_dtype, precision_on_device
from mmtrain.runtime.execution.process_groups import ProcessGroups, build_groups
from mmtrain.runtime.execution.rank_context import (
    RankContext,
    build_unit,
    edge_widths,
    forward_only,
    payload_needs,
    unit_inputs,
)
from mmtrain.runtime.execution.unit import MicrobatchState, UnitRunner
from mmtrain.runtime.training.checkpointing import shard_spec
from mmtrain.runtime.world import World

NO_LOSS = {LLM: 0.0}


class GreedyGenerator:
    """One rank's share of a model that answers. All ranks of the graph must call `generate` together."""

    def __init__(
        self,
        graph: StageGraph,
        model: ModelShape,
        units: Mapping[str, UnitRunner],
        groups: ProcessGroups,
        world: World,
        dtype: torch.dtype,
        tokenizer: ChatTokenizer,
        activity: Activity | None = None,
    ) -> None:
        """Prepare to answer with `units`, this rank's part of `graph`; ids that `tokenizer` lacks are never written."""
        self._world, self._dtype, self._tokenizer, self.activity = world, dtype, tokenizer, activity or Activity()
        self._groups, self._widths = groups, edge_widths(graph, model)
        self.units: dict[str, UnitRunner] = dict(units)
        self._sharers = {
            name: unit.groups.tp_size
            for name, unit in units.items()
            if any(stage.factory.sequence_parallel for stage in unit.stages.values())
        }
        reading = build_program(forward_only(_with_microbatches(graph, graph.mesh(LLM).pp)), kind="coarse")
        self._graph = reading.graph
        self._end = max((s.id for s in graph.stages if s.id.unit == LLM), key=lambda sid: sid.index)
        if LLM in units:
            self._llm = self.units[LLM] = _AnsweringLlm(units[LLM], self._end, tokenizer.vocab_size)
            self._replica = next(r for sid, r in graph.held_by(world.rank) if sid.unit == LLM)
            self._writer = self._executor(build_program(_only_llm(self._graph)))
        self._reader = self._executor(reading)
        self.needs: tuple[PayloadNeed, ...] = payload_needs(graph, units, world.rank)
        self.dp = {mesh.unit: mesh.dp for mesh in graph.meshes}
        self.num_microbatches = {mesh.unit: mesh.num_microbatches for mesh in reading.graph.meshes}
        self.reading = reading

    @classmethod
    def of(cls, job: RankContext, tokenizer: ChatTokenizer) -> "GreedyGenerator":
        """Answer with the units of a job, as they are trained at the moment of writing."""
        return cls(job.graph, job.shape, job.units, job.groups, job.world, job.dtype, tokenizer, job.activity)

    @torch.no_grad()
    def generate(self, data: StepData, max_new_tokens: int) -> dict[int, list[int]]:
        """Continue the prompts of a batch by the likeliest token, again and again.

        An answer ends before `<|end|>`, or at `max_new_tokens`, of which there must be one. Returns the answers of the
        LLM replica that this rank is part of, by sample id; none on a rank that holds no part of it.
        """
        inputs = unit_inputs(data, self._world.device, self._dtype)
        drafts: dict[Microbatch, _Draft] = {}
        if LLM in self.units:
            drafts = {mb: _Draft.of(data, mb, max_new_tokens) for mb in self._microbatches()}
            for mb, draft in drafts.items():
                prompts = inputs[mb]
                assert isinstance(prompts, TextInput)
                inputs[mb] = replace(prompts, kv_cache=draft.kv_cache)
        self._reader.run(StepInput(inputs, step_loads(self._graph, data.meta), NO_LOSS))
        for num_left in range(max_new_tokens - 1, -1, -1):
            self._accept(drafts)
            if not num_left or not any(draft.open for draft in drafts.values()):
                break
            self._writer.run(self._next_tokens(drafts))
        return {sample: answer for draft in drafts.values() for sample, answer in draft.answers.items()}

    def _microbatches(self) -> list[Microbatch]:
        return [Microbatch(LLM, self._replica, i) for i in range(self.num_microbatches[LLM])]

    def _next_tokens(self, drafts: "Mapping[Microbatch, _Draft]") -> StepInput:
        """The last token of every open answer."""
        inputs = {mb: draft.last_tokens(self._world.device) for mb, draft in drafts.items()}
        counts = {mb: len(draft.open) for mb, draft in drafts.items()}
        loads = {mb: TokenLoad(n, n, min(n, 1), n) for mb, n in counts.items()}
        return StepInput(dict(inputs), StepLoads(loads, {}, counts), NO_LOSS)

    def _accept(self, drafts: "Mapping[Microbatch, _Draft]") -> None:
        """Bring the picked tokens from the last stage to all stages of the replica, and append them."""
        if not drafts:
            return
        groups, counts = self._llm.groups, [len(draft.open) for draft in drafts.values()]
        if self._end in self._llm.stages:
            tokens = torch.cat([self._llm.picked.pop(draft.kv_cache) for draft in drafts.values()])
        else:
            tokens = torch.empty(sum(counts), dtype=torch.int64, device=self._world.device)
        if groups.pp.size() > 1:
            # Tensor-parallel ranks have picked the same: each hands it to its own place in the other TP groups.
            tp_group = self._graph.tp_group(self._end, self._replica)
            dist.broadcast(tokens, src=tp_group[groups.tp_rank], group=groups.pp)
        for draft, mine in zip(drafts.values(), torch.split(tokens.cpu(), counts), strict=True):
            draft.accept(mine.tolist(), self._tokenizer.end_id)

    def _executor(self, program: Program) -> Executor:
        graph, rank = program.graph, self._world.rank
        actions = [a for a in program.for_rank(rank) if not isinstance(a, Step)]
        device, limit = self._world.device, send_window(program)
        broker = Broker(
            graph, actions, rank, self._groups, self._widths, self._sharers, limit, device, self._dtype, self.activity
        )
        return Executor(graph, actions, self.units, broker, None, self.activity)


@dataclass
class _Draft:
    """The answers of one microbatch while they are written. All ranks of a replica keep the same."""

    open: list[int]  # sample ids whose answer goes on, in the order of their sequences
    answers: dict[int, list[int]]
    kv_cache: KVCache
    lengths: tuple[int, ...]  # tokens of each open sequence in the pass under way

    @classmethod
    def of(cls, data: StepData, mb: Microbatch, max_new_tokens: int) -> "_Draft":
        rows = data.meta.microbatch(mb.replica, mb.index)
        samples, lengths = data.meta.sample_id[rows].tolist(), tuple(data.meta.tokens[rows].tolist())
        memory = KVCache(max(lengths, default=0) + max_new_tokens, (0,) * len(lengths))
        return cls(samples, {sample: [] for sample in samples}, memory, lengths)

    def accept(self, tokens: list[int], end: int) -> None:
        """Append a token to each open answer, or close it."""
        self.kv_cache.advance(self.lengths)
        for sample, token in zip(self.open, tokens, strict=True):
            if token != end:
                self.answers[sample].append(token)
        goes_on = [i for i, token in enumerate(tokens) if token != end]
        self.kv_cache.select_sequences(goes_on)
        self.open, self.lengths = [self.open[i] for i in goes_on], (1,) * len(goes_on)

    def last_tokens(self, device: torch.device) -> TextInput:
        ids = torch.tensor([self.answers[sample][-1] for sample in self.open], dtype=torch.int64, device=device)
        return TextInput(self.lengths, ids, kv_cache=self.kv_cache)


class _AnsweringLlm(UnitRunner):
    """The LLM's stages while they answer: the last one picks tokens, and leaves them in `picked`, instead of a loss."""

    def __init__(self, unit: UnitRunner, end: StageId, vocab_size: int) -> None:
        super().__init__(unit.name, unit.stages, unit.groups)
        self._end, self._vocab_size = end, vocab_size
        self.picked: dict[KVCache, Tensor] = {}

    def forward(self, passage: MicrobatchState, lo: int, hi: int) -> None:
        if passage.stage != self._end:
            super().forward(passage, lo, hi)
            return
        inputs = passage.inputs
        assert isinstance(inputs, TextInput)
        assert inputs.kv_cache is not None
        hidden = next((tensor for edge, tensor in passage.received.items() if not edge.crosses_units), None)
        features = {edge.src.unit: tensor for edge, tensor in passage.received.items() if edge.crosses_units}
        with tp_group_scope(self.groups):
            tokens = self.stages[self._end].next_tokens(hidden, inputs, features, self._vocab_size)
        self.picked[inputs.kv_cache] = tokens
        passage.left.append((torch.zeros(()),))


def load_generator(
    recipe: Recipe, plans: Mapping[str, UnitPlan], world: World, checkpoint: Checkpoint, tokenizer: ChatTokenizer
) -> GreedyGenerator:
    """Build this rank's stages, of the layout in `plans`, out of a checkpoint that any plan may have written.

    Raises CheckpointError, naming the parameter, when one is missing or has another shape.
    """
    # The recipe's choice of attention may need the machine that it was trained on.
    train = recipe.train.model_copy(update={"attention": "auto"})
    recipe, model = recipe.model_copy(update={"train": train}), build_model_shape(recipe)
    graph = build_stage_graph(plans, dict.fromkeys(plans, 1), model)
    dtype = compute_dtype(precision_on_device(recipe.train.precision, world.device), world.device)
    groups = build_groups(graph, world)
    units = {
        # Slices of the tokens save memory of activations, of which writing has next to none.
        mesh.unit: build_unit(recipe, model, graph, mesh.unit, False, groups, world, dtype)
        for mesh in graph.meshes
        if world.rank in mesh.ranks
    }
    for unit in units.values():
        load_weights(unit, checkpoint)
    generator = GreedyGenerator(graph, model, units, groups, world, dtype, tokenizer)
    probe_channels(generator.reading.for_rank(world.rank), groups, world)
    return generator


def load_weights(unit: UnitRunner, checkpoint: Checkpoint) -> None:
    """Fill a unit's stages with their part of a checkpoint's weights. Raises CheckpointError."""
    tp, tp_rank = unit.groups.tp_size, unit.groups.tp_rank
    with torch.no_grad():
        for stage in unit.stages.values():
            specs = params.stage_param_specs(stage, unit.name, tp)
            for name, param in stage.named_parameters():
                piece = NamedShard(specs[name].name, specs[name], tp_rank, tp, None, param)
                param.copy_(checkpoint.read(piece.name, shard_spec(piece)).reshape(param.shape))


def _with_microbatches(graph: StageGraph, count: int) -> StageGraph:
    """The same with `count` microbatches for each replica of each unit."""
    return replace(graph, meshes=tuple(replace(mesh, num_microbatches=count) for mesh in graph.meshes))


def _only_llm(graph: StageGraph) -> StageGraph:
    return replace(
        graph,
        meshes=(graph.mesh(LLM),),
        stages=tuple(stage for stage in graph.stages if stage.id.unit == LLM),
        edges=tuple(edge for edge in graph.edges if edge.src.unit == edge.dst.unit == LLM),
    )
