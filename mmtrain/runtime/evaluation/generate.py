"""Generate greedy answers with the units of a plan, for a model that need not fit one process.

*Prefill* is the forward program of the whole graph over a batch of prompts, laid out like a batch of training: encoders
turn every item into features once, brokers move those to the LLM, and each LLM stage caches keys and values. *Decode*
is the forward program of the LLM alone, over one new token of every answer that has not ended. The last stage picks
the token; a broadcast brings it to all pipeline ranks of the replica. A replica has as many microbatches as pipeline
ranks, so that all of these have work while a token is on its way; replicas do not wait for each other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.balance import IntArray
from mmtrain.checkpoint import Checkpoint
from mmtrain.costs import TokenLoad
from mmtrain.data import PayloadNeed, SampleTokenizer, StepData
from mmtrain.errors import UserError
from mmtrain.models.attention.kv_cache import KVCache
from mmtrain.models.kernels.vocab_loss import LogitRules
from mmtrain.models.optim import parameter_specs
from mmtrain.models.optim.parameter_specs import NamedShard
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.models.stage.fully_sharded import weight_shards
from mmtrain.models.stage.generation import next_tokens
from mmtrain.models.stage.stage_inputs import TextInput
from mmtrain.planning.artifact.plan import UnitPlan
from mmtrain.planning.artifact.plan_graph import build_stage_graph
from mmtrain.program import LLM, Microbatch, Program, StageGraph, StageId, Step, StepLoads, build_program, step_loads
from mmtrain.program.verify.deadlock import send_window
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.modalities import GENERATOR
from mmtrain.runtime.execution.activity import Activity
from mmtrain.runtime.execution.broker import Broker
from mmtrain.runtime.execution.checkpointing import shard_spec
from mmtrain.runtime.execution.executor import Executor, StepInput
from mmtrain.runtime.execution.precision import compute_dtype, precision_on_device
from mmtrain.runtime.execution.process_groups import Transport, build_groups, probe_channels
from mmtrain.runtime.execution.rank_context import (
    RankContext,
    build_units,
    edge_widths,
    forward_only,
    payload_needs,
)
from mmtrain.runtime.execution.unit import MicrobatchState, ShardedUnitRunner, UnitRunner
from mmtrain.runtime.execution.unit_inputs import unit_inputs
from mmtrain.runtime.world import World
from mmtrain.weights import PretrainedWeights

NO_LOSS = {LLM: 0.0}
NO_PROMPTS: Mapping[int, IntArray] = {}
TokenListener = Callable[[Mapping[int, Sequence[int]]], None]  # hears of the answers so far, by sample id


class GreedyGenerator:
    """One rank's share of a model that answers. All ranks of the graph must call `generate` together."""

    def __init__(
        self,
        graph: StageGraph,
        units: Mapping[str, UnitRunner],
        transport: Transport,
        tokenizer: SampleTokenizer,
        recipe: Recipe,
        activity: Activity | None = None,
        gather_params: Callable[[], None] | None = None,
    ) -> None:
        """Prepare to answer with `units`, this rank's part of `graph`; never generate ids that `tokenizer` lacks.

        recipe: says how pixels are normalized. gather_params: brings the weights of `units` up to date, if training
        updates them; all ranks answer together.
        """
        self._gather_params = gather_params
        self._recipe = recipe
        self._transport, self._tokenizer, self.activity = transport, tokenizer, activity or Activity()
        answering = _without_generator(_with_microbatches(_without_sharing(graph), graph.mesh(LLM).pp))
        self.prefill_program = build_program(forward_only(answering), kind="coarse")
        self._graph = self.prefill_program.graph
        self._last_stage = max((s.id for s in graph.stages if s.id.unit == LLM), key=lambda stage_id: stage_id.index)
        self.all_units = units  # with the one that draws
        self.units = {name: unit for name, unit in units.items() if name != GENERATOR}
        if LLM in units:
            self._llm = self.units[LLM] = _TokenPickingLlm(units[LLM], self._last_stage, tokenizer)
            self._replica = next(replica for stage, replica in graph.held_by(transport.rank) if stage.unit == LLM)
            self._decoder = self._executor(build_program(_only_llm(self._graph)))
        self._prefiller = self._executor(self.prefill_program)
        self.needs: tuple[PayloadNeed, ...] = payload_needs(self._graph, self.units, transport.rank)
        self.dp = {mesh.unit: mesh.dp for mesh in self._graph.meshes}
        self.num_microbatches = {mesh.unit: mesh.num_microbatches for mesh in self._graph.meshes}

    @classmethod
    def of(cls, rank_context: RankContext, tokenizer: SampleTokenizer) -> "GreedyGenerator":
        """Answer with the units of a run in training, with the weights that they have when `generate` is called."""
        recipe = rank_context.recipe
        units, transport = rank_context.units, rank_context.transport
        gather_params = rank_context.optimizer.gather_params
        return cls(rank_context.graph, units, transport, tokenizer, recipe, rank_context.activity, gather_params)

    @torch.no_grad()
    def generate(
        self,
        data: StepData,
        max_new_tokens: int,
        prompts: Mapping[int, IntArray] = NO_PROMPTS,
        listener: TokenListener | None = None,
    ) -> dict[int, list[int]]:
        """Continue the prompts of a batch by the likeliest token, again and again.

        prompts: the ids of each sample's prompt, for models whose logits depend on what was written before.
        listener: hears after each token of the answers that this rank has so far.

        An answer ends before a token that ends answers, or after `max_new_tokens` (at least 1). Return the answers of
        the LLM replica that this rank is part of, by sample id; none on a rank that holds no part of the LLM.
        """
        if self._gather_params is not None:
            self._gather_params()
        stages = {name: unit.stages.values() for name, unit in self.units.items()}
        inputs = unit_inputs(data, stages, self._recipe)
        drafts: dict[Microbatch, _Draft] = {}
        if LLM in self.units:
            drafts = {mb: _Draft.of(data, mb, max_new_tokens, prompts) for mb in self._microbatches()}
            self._llm.seen = {draft.kv_cache: draft.seen_ids for draft in drafts.values()}
            for mb, draft in drafts.items():
                of_prompts = inputs[mb]
                assert isinstance(of_prompts, TextInput)
                inputs[mb] = replace(of_prompts, kv_cache=draft.kv_cache)
        self._prefiller.run(StepInput(inputs, step_loads(self._graph, data.meta), NO_LOSS))
        for num_left in range(max_new_tokens - 1, -1, -1):
            self._append_tokens(drafts)
            if listener is not None:
                listener(_answers_of(drafts))
            if not num_left or not self._is_any_open(drafts):
                break
            self._decoder.run(self._decode_input(drafts))
        return _answers_of(drafts)

    def _is_any_open(self, drafts: "Mapping[Microbatch, _Draft]") -> bool:
        """Return whether an answer goes on; of a sharded LLM on any replica, as all must gather its weights."""
        is_open = any(draft.open for draft in drafts.values())
        if self._graph.mesh(LLM).shard is None:
            return is_open
        flag = torch.tensor(int(is_open), device=self._transport.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def _microbatches(self) -> list[Microbatch]:
        return [Microbatch(LLM, self._replica, i) for i in range(self.num_microbatches[LLM])]

    def _decode_input(self, drafts: "Mapping[Microbatch, _Draft]") -> StepInput:
        """Return the last token of every open answer as the input of the decode program."""
        inputs = {mb: draft.last_tokens(self._transport.device) for mb, draft in drafts.items()}
        if drafts:
            self._llm.seen = {draft.kv_cache: draft.seen_ids for draft in drafts.values()}
        counts = {mb: len(draft.open) for mb, draft in drafts.items()}
        loads = {mb: TokenLoad(count, count, min(count, 1), count) for mb, count in counts.items()}
        return StepInput(dict(inputs), StepLoads(loads, {}, counts), NO_LOSS)

    def _append_tokens(self, drafts: "Mapping[Microbatch, _Draft]") -> None:
        """Broadcast the picked tokens from the last stage to all stages of the replica, and append them."""
        if not drafts:
            return
        groups = self._llm.groups
        counts = [len(draft.open) for draft in drafts.values()]
        if self._last_stage in self._llm.stages:
            tokens = torch.cat([self._llm.picked.pop(draft.kv_cache) for draft in drafts.values()])
        else:
            tokens = torch.empty(sum(counts), dtype=torch.int64, device=self._transport.device)
        if groups.pp.size() > 1:
            # All ranks of the last stage's TP group picked the same; each sends to the same TP rank of other stages.
            last_ranks = self._graph.tp_group(self._last_stage, self._replica)
            dist.broadcast(tokens, src=last_ranks[groups.tp_rank], group=groups.pp)
        for draft, picked in zip(drafts.values(), torch.split(tokens.cpu(), counts), strict=True):
            draft.append(picked.tolist(), self._tokenizer.end_ids)

    def _executor(self, program: Program) -> Executor:
        of_rank = program.for_rank(self._transport.rank) if self.units else ()  # else a rank that only draws
        actions = [action for action in of_rank if not isinstance(action, Step)]
        broker = Broker(program.graph, actions, self._transport, send_window(program), self.activity)
        return Executor(program.graph, actions, self.units, broker, None, self.activity)


def _answers_of(drafts: "Mapping[Microbatch, _Draft]") -> dict[int, list[int]]:
    return {sample: answer for draft in drafts.values() for sample, answer in draft.answers.items()}


@dataclass
class _Draft:
    """The answers of one microbatch while they are generated; equal on all ranks of a replica."""

    open: list[int]  # sample ids whose answer goes on, in the order of their sequences
    answers: dict[int, list[int]]
    kv_cache: KVCache
    lengths: tuple[int, ...]  # tokens of each open sequence in the pass under way
    next_positions: list[int] | None  # rotary position of each open sequence's next token, where the input states it
    prompts: Mapping[int, IntArray]  # by sample id; may be empty where nothing depends on them

    @property
    def seen_ids(self) -> list[set[int]]:
        """The ids in the prompt and the answer of each open sequence."""
        return [{*map(int, self.prompts.get(sample, ())), *self.answers[sample]} for sample in self.open]

    @classmethod
    def of(cls, data: StepData, mb: Microbatch, max_new_tokens: int, prompts: Mapping[int, IntArray]) -> "_Draft":
        rows = data.meta.microbatch(mb.replica, mb.index)
        samples = data.meta.sample_id[rows].tolist()
        lengths = tuple(data.meta.tokens[rows].tolist())
        kv_cache = KVCache(max(lengths, default=0) + max_new_tokens, (0,) * len(lengths))
        position_ids = data.text[mb.replica, mb.index].position_ids
        next_positions = None
        if position_ids is not None:  # a prompt ends with text, whose positions in time, row and column are equal
            next_positions = [int(position_ids[0, end - 1]) + 1 for end in accumulate(lengths)]
        return cls(samples, {sample: [] for sample in samples}, kv_cache, lengths, next_positions, prompts)

    def append(self, tokens: list[int], end_ids: frozenset[int]) -> None:
        """Append a token to each open answer; close those whose token is one of `end_ids`."""
        self.kv_cache.advance(self.lengths)
        for sample, token in zip(self.open, tokens, strict=True):
            if token not in end_ids:
                self.answers[sample].append(token)
        still_open = [i for i, token in enumerate(tokens) if token not in end_ids]
        self.kv_cache.select_sequences(still_open)
        self.open = [self.open[i] for i in still_open]
        self.lengths = (1,) * len(still_open)
        if self.next_positions is not None:
            self.next_positions = [self.next_positions[i] for i in still_open]

    def last_tokens(self, device: torch.device) -> TextInput:
        """Return the last token of each open answer."""
        ids = torch.tensor([self.answers[sample][-1] for sample in self.open], dtype=torch.int64, device=device)
        position_ids = None
        if self.next_positions is not None:
            position_ids = torch.tensor(self.next_positions, dtype=torch.int64, device=device).expand(3, -1)
            self.next_positions = [position + 1 for position in self.next_positions]
        no_queries = torch.empty(0, dtype=torch.int64, device=device)
        return TextInput(
            self.lengths, ids, position_ids=position_ids, kv_cache=self.kv_cache, query_positions=no_queries
        )


class _TokenPickingLlm(UnitRunner):
    """The LLM's stages in generation: the last one picks tokens, left in `picked`, instead of computing a loss."""

    def __init__(self, unit: UnitRunner, last_stage: StageId, tokenizer: SampleTokenizer) -> None:
        super().__init__(unit.name, unit.stages, unit.groups)
        self._last_stage, self._vocab_size, self._greedy = last_stage, tokenizer.vocab_size, tokenizer.greedy
        self.picked: dict[KVCache, Tensor] = {}
        self.seen: dict[KVCache, list[set[int]]] = {}  # ids in each open sequence

    def forward(self, microbatch: MicrobatchState, lo: int, hi: int) -> None:
        if microbatch.stage != self._last_stage:
            super().forward(microbatch, lo, hi)
            return
        inputs = microbatch.inputs
        assert isinstance(inputs, TextInput)
        assert inputs.kv_cache is not None
        received = microbatch.received
        hidden = next((tensor for edge, tensor in received.items() if not edge.crosses_units), None)
        features = {edge.src.unit: tensor for edge, tensor in received.items() if edge.crosses_units}
        stage = self.stages[self._last_stage]
        rules = None
        if self._greedy.changes_logits:
            rules = self._logit_rules(self.seen[inputs.kv_cache], next(stage.parameters()).device)
        tokens = next_tokens(stage, hidden, inputs, features, self._vocab_size, rules)
        self.picked[inputs.kv_cache] = tokens
        microbatch.part_outputs.append((torch.zeros(()),))  # where the executor looks for a loss

    def _logit_rules(self, seen: Sequence[set[int]], device: torch.device) -> LogitRules:
        pairs = [(row, token) for row, tokens in enumerate(seen) for token in sorted(tokens)]
        rows, ids = torch.tensor(pairs, dtype=torch.int64, device=device).reshape(-1, 2).T
        suppressed = torch.tensor(self._greedy.suppressed_ids, dtype=torch.int64, device=device)
        return LogitRules(rows, ids, self._greedy.repetition_penalty, suppressed)


def load_generator(
    recipe: Recipe,
    plans: Mapping[str, UnitPlan],
    world: World,
    weights: Checkpoint | PretrainedWeights,
    tokenizer: SampleTokenizer,
) -> GreedyGenerator:
    """Build this rank's stages, of the layout in `plans`, from a checkpoint that any plan may have written.

    weights: the checkpoint, or those of a model's folder.

    Raises CheckpointError or UserError, naming the parameter, when one is missing or has another shape.
    """
    # The recipe's choice of attention and kernels may need the machine that it was trained on.
    train = recipe.train.model_copy(update={"attention": "auto", "kernels": "auto"})
    recipe = recipe.model_copy(update={"train": train})
    model = build_model_shape(recipe)
    graph = build_stage_graph(plans, dict.fromkeys(plans, 1), model)
    dtype = compute_dtype(precision_on_device(recipe.train.precision, world.device), world.device)
    groups = build_groups(graph, world)
    probe_channels(groups, world)
    # Without sequence parallelism: it saves memory of activations, and generation keeps next to none.
    transport = Transport(world.rank, groups, edge_widths(graph, model), {}, world.device, dtype)
    units = build_units(recipe, model, graph, transport)
    for unit in units.values():
        if isinstance(weights, PretrainedWeights):
            _fill_from_folder(unit, weights)
        else:
            load_weights(unit, weights)
    return GreedyGenerator(graph, units, transport, tokenizer, recipe)


def load_weights(unit: UnitRunner, checkpoint: Checkpoint) -> None:
    """Fill a unit's stages with their part of a checkpoint's weights. Raises CheckpointError."""
    tp, tp_rank = unit.groups.tp_size, unit.groups.tp_rank
    with torch.no_grad():
        if isinstance(unit, ShardedUnitRunner):
            for shard in weight_shards(unit.parameter_specs(), unit.sharding, unit.groups.tp):
                shard.tensor.copy_(checkpoint.read(shard.name, shard_spec(shard)).view_as(shard.tensor))
            return
        for stage in unit.stages.values():
            specs = parameter_specs.stage_param_specs(stage, unit.name, tp)
            for name, param in stage.named_parameters():
                piece = NamedShard(specs[name].name, specs[name], tp_rank, tp, None, param)
                param.copy_(checkpoint.read(piece.name, shard_spec(piece)).reshape(param.shape))


def _fill_from_folder(unit: UnitRunner, weights: PretrainedWeights) -> None:
    """Fill a unit's stages with the weights of a model's folder. Raises UserError for one that it lacks."""
    tp, tp_rank = unit.groups.tp_size, unit.groups.tp_rank
    with torch.no_grad():
        for stage in unit.stages.values():
            specs = parameter_specs.stage_param_specs(stage, unit.name, tp)
            for name, param in stage.named_parameters():
                if not weights.fill(param, specs[name], tp_rank, tp):
                    raise UserError(
                        f"{specs[name].name}: the model's folder has no such weights, so that it would answer with "
                        "random ones; name a folder that holds a whole model"
                    )


def _with_microbatches(graph: StageGraph, count: int) -> StageGraph:
    """Return the graph with `count` microbatches for each replica of each unit."""
    return replace(graph, meshes=tuple(replace(mesh, num_microbatches=count) for mesh in graph.meshes))


def _without_sharing(graph: StageGraph) -> StageGraph:
    """Return the graph with a microbatch of its own for every replica.

    Replicas that share sequences in training hold the same weights, and a prompt fits on one: apart, they answer as
    many prompts at once as there are replicas, and tokens that are generated need no other rank.
    """
    return replace(graph, meshes=tuple(replace(mesh, dp=mesh.num_replicas, cp=1) for mesh in graph.meshes))


def _without_generator(graph: StageGraph) -> StageGraph:
    """Return the graph without the unit that draws, which answers in text do not need."""
    return replace(
        graph,
        meshes=tuple(mesh for mesh in graph.meshes if mesh.unit != GENERATOR),
        stages=tuple(stage for stage in graph.stages if stage.id.unit != GENERATOR),
        edges=tuple(edge for edge in graph.edges if GENERATOR not in (edge.src.unit, edge.dst.unit)),
    )


def _only_llm(graph: StageGraph) -> StageGraph:
    """Return the graph of the LLM alone."""
    return replace(
        graph,
        meshes=(graph.mesh(LLM),),
        stages=tuple(stage for stage in graph.stages if stage.id.unit == LLM),
        edges=tuple(edge for edge in graph.edges if edge.src.unit == edge.dst.unit == LLM),
    )
