"""Build everything that one rank needs to execute a plan, once; it runs in every step."""

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mmtrain.costs import Precision
from mmtrain.costs.expert_spread import fullest_rank_load
from mmtrain.data.index.sample_sources import SampleSources
from mmtrain.data.loading.batch_builder import StepData
from mmtrain.data.loading.payload import PayloadNeed
from mmtrain.models.build_stage import StageOptions, build_stage, build_stage_without_weights
from mmtrain.models.megatron.experts import ExpertMlp
from mmtrain.models.megatron.selection_biases import SelectionBiases
from mmtrain.models.megatron.zero_adamw import BucketNumber, LocalParam, ZeroAdamW
from mmtrain.models.optim import parameter_specs
from mmtrain.models.optim.parameter_specs import UnitRates, WeightSource
from mmtrain.models.shapes.layer_shape import MoeMlp, is_of_expert
from mmtrain.models.shapes.model_shape import LayerShape, ModelShape, build_model_shape
from mmtrain.models.shapes.param_spec import ParamSpec
from mmtrain.models.stage.fully_sharded import FullyShardedAdamW, initialize_shards, release_weights, shard_stage
from mmtrain.models.stage.guest_stage import GuestStage
from mmtrain.models.stage.stage_module import StageModule, StageSpec
from mmtrain.planning.artifact.plan import Plan, SchedulePlan
from mmtrain.planning.artifact.plan_files import require_shareable
from mmtrain.planning.artifact.plan_graph import planned_shape, stage_graph
from mmtrain.planning.artifact.plan_memory import DeviceMemory, prove_memory
from mmtrain.program import (
    LLM,
    Edge,
    MemoryLimit,
    Program,
    StageGraph,
    StageId,
    Step,
    UnitMesh,
    build_program,
    step_loads,
)
from mmtrain.program.verify.deadlock import send_window
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.modalities import GENERATOR
from mmtrain.runtime.execution.activity import BUILDING, Activity
from mmtrain.runtime.execution.broker import Broker
from mmtrain.runtime.execution.executor import Executor, StepInput, StepOutcome
from mmtrain.runtime.execution.fault_points import FaultPoints
from mmtrain.runtime.execution.optimizer import JoinedOptimizers, Optimizer, UnitOptimizer
from mmtrain.runtime.execution.precision import compute_dtype
from mmtrain.runtime.execution.process_groups import ProcessGroups, Transport, build_groups, probe_channels
from mmtrain.runtime.execution.recorder import StepRecorder, clock_for
from mmtrain.runtime.execution.unit import ShardedUnitRunner, UnitRunner
from mmtrain.runtime.execution.unit_inputs import SharedReplica, host_inputs, loss_scales, map_tensors
from mmtrain.runtime.execution.unit_rates import unit_rates
from mmtrain.runtime.world import World


@dataclass(frozen=True)
class RankContext:
    """One rank's units, optimizer and executors, and what they were built from."""

    recipe: Recipe
    world: World
    shape: ModelShape
    graph: StageGraph
    program: Program
    transport: Transport
    units: Mapping[str, UnitRunner]
    optimizer: Optimizer
    train_executor: Executor
    validation_executor: Executor  # the same stages, forward only
    precision: Precision  # as the plan states it
    activity: Activity
    faults: FaultPoints

    @property
    def dp(self) -> dict[str, int]:
        """Data-parallel degree of every unit."""
        return {mesh.unit: mesh.dp for mesh in self.graph.meshes}

    @property
    def num_microbatches(self) -> dict[str, int]:
        """Microbatches of each replica of every unit in one step."""
        return {mesh.unit: mesh.num_microbatches for mesh in self.graph.meshes}

    @property
    def needs(self) -> tuple[PayloadNeed, ...]:
        """The payload this rank computes on."""
        return payload_needs(self.graph, self.units, self.world.rank)

    @cached_property
    def shared_replica(self) -> SharedReplica | None:
        """The LLM's replica on this rank, if it shares the sequences of its microbatches."""
        mesh = self.graph.mesh(LLM)
        held = [replica for stage, replica in self.graph.held_by(self.world.rank) if stage.unit == LLM]
        return SharedReplica(mesh, held[0]) if held and mesh.cp > 1 else None

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights and activations."""
        return self.transport.dtype

    def host_input(self, data: StepData, sources: SampleSources | None = None, *, trains: bool = True) -> StepInput:
        """Make the input of a step, with tensors on the host. Another thread may call this while a step computes.

        With `sources`, the outcome of the step has its loss by source. trains: False for validation.
        """
        stages = {name: unit.stages.values() for name, unit in self.units.items()}
        inputs = host_inputs(data, stages, self.recipe, sources, self.shared_replica, trains)
        loss_scale = loss_scales(self.recipe, data.meta)
        loads = step_loads(self.graph, data.meta)
        # Those of validation are among them.
        rows, exchanges = self.train_executor.host_rows(loads), self.train_executor.host_exchanges(loads)
        return StepInput(inputs, loads, loss_scale, step=data.meta.step, route_rows=rows, exchanges=exchanges)

    def validate_on(self, step: StepInput) -> StepOutcome:
        """Compute the loss of a global batch whose input is on the device; change no weight."""
        self.optimizer.gather_params()
        return self.validation_executor.run(step)

    def train(self, data: StepData, lr: float) -> StepOutcome:
        """Bring the input of a step to the device, wait for it, and run one optimizer step."""
        return self.train_executor.run(replace(self._device_input(data, trains=True), lr=lr))

    def validate(self, data: StepData) -> StepOutcome:
        """Bring a global batch to the device, wait for it, and compute its loss; change no weight."""
        return self.validate_on(self._device_input(data, trains=False))

    def _device_input(self, data: StepData, *, trains: bool) -> StepInput:
        step = self.host_input(data, trains=trains)
        return map_tensors(step, lambda tensor: tensor.to(self.world.device))


def build_rank_context(
    recipe: Recipe,
    plan: Plan,
    world: World,
    activity: Activity | None = None,
    faults: FaultPoints | None = None,
    pretrained: WeightSource | None = None,
    device_memory: DeviceMemory | None = None,
) -> RankContext:
    """Build what this rank of the plan runs: groups, stages, optimizer, executors. All ranks call this together.

    Parameters start with the weights that `pretrained` has for them, others with random ones.

    The program is checked before anything is built, memory included where `device_memory` says what there is. Then the
    ranks are connected and every channel is probed, under the watchdog of `activity`: what waits there waits for a rank
    that does not come.

    Raises LaunchError where this device cannot compute in the plan's precision, and for a channel that does not work;
    PlanError for a plan that does not fit into `device_memory`, or shares sequences that the model cannot share.
    """
    require_shareable(plan, recipe)
    activity = activity or Activity(recorder=StepRecorder(clock_for(world.device)))
    faults = faults or FaultPoints()
    precision = plan.precision
    dtype = compute_dtype(precision, world.device)
    model = planned_shape(plan, build_model_shape(recipe))
    graph = stage_graph(plan, model)
    limit = None if device_memory is None else prove_memory(recipe, plan, model, device_memory)
    program, forward_program = build_programs(graph, plan.schedule, limit)
    groups = _connect(graph, world, activity)
    actions = program.for_rank(world.rank)
    sequence_parallel = {name: unit.tp for name, unit in plan.units.items() if unit.sp}
    widths, readers = edge_widths(graph, model), state_readers(graph, model)
    transport = Transport(world.rank, groups, widths, sequence_parallel, world.device, dtype, readers)
    units = build_units(recipe, model, graph, transport, sequence_parallel, pretrained)
    if limit is not None:
        _limit_rows_of_experts(plan, model, units)
    unit_optimizers = {name: _optimizer_of(recipe, unit, world, graph) for name, unit in units.items()}
    biases = _selection_biases(recipe, units)
    optimizer = Optimizer(unit_optimizers, recipe.train.optimizer, world, groups.tied_embeddings, biases)
    if pretrained is not None:
        optimizer.start_masters(pretrained)
    broker = Broker(graph, actions, transport, send_window(program), activity)
    forward_actions = [action for action in forward_program.for_rank(world.rank) if not isinstance(action, Step)]
    forward_broker = Broker(forward_program.graph, forward_actions, transport, send_window(forward_program), activity)
    return RankContext(
        recipe=recipe,
        world=world,
        shape=model,
        graph=graph,
        program=program,
        transport=transport,
        units=units,
        optimizer=optimizer,
        train_executor=Executor(graph, actions, units, broker, optimizer, activity, faults),
        validation_executor=Executor(forward_program.graph, forward_actions, units, forward_broker, None, activity),
        precision=precision,
        activity=activity,
        faults=faults,
    )


def _limit_rows_of_experts(plan: Plan, model: ModelShape, units: Mapping[str, UnitRunner]) -> None:
    """Let mixtures compute at once no more rows than the plan has memory for."""
    if LLM not in units:
        return
    tokens = plan.data.largest_microbatch[LLM].tokens
    for stage in units[LLM].stages.values():
        for name, layer in stage.layers.items():
            shape = model.unit(LLM).layers[int(name)].mlp
            for module in layer.modules():
                if isinstance(module, ExpertMlp) and isinstance(shape, MoeMlp):
                    module.max_rows = math.ceil(tokens * shape.top_k * fullest_rank_load(shape))


def _connect(graph: StageGraph, world: World, activity: Activity) -> ProcessGroups:
    """Connect the ranks, and probe every channel."""
    groups = build_groups(graph, world, activity)
    probe_channels(groups, world, activity)
    activity.start(BUILDING)
    return groups


def build_programs(graph: StageGraph, schedule: SchedulePlan, limit: MemoryLimit | None) -> tuple[Program, Program]:
    """Build the checked programs of training and of validation; `limit`: what activations of training may take."""
    program = build_program(graph, limit, schedule.kind, schedule.order)
    return program, build_program(forward_only(graph), kind=schedule.kind, order=schedule.order)


def payload_needs(graph: StageGraph, units: Mapping[str, UnitRunner], rank: int) -> tuple[PayloadNeed, ...]:
    """Return the payload a rank with these units computes on.

    First layers need media or ids, the head needs labels, and all stages of some LLMs need positions or images' spans.
    A generator's embedding and its last layer need the images to draw.
    """
    # Not the rank in the unit's data-parallel group: torch orders that group by global rank, whatever the mesh says.
    replica_of = {stage.unit: replica for stage, replica in graph.held_by(rank)}
    needs = []
    for name, unit in units.items():
        has_first_layer = any(0 in stage.indices for stage in unit.stages.values())
        has_last_layer = any(len(stage.shape.layers) - 1 in stage.indices for stage in unit.stages.values())
        is_llm = name == LLM
        has_embedding = any(1 in stage.indices for stage in unit.stages.values())  # of noisy patches, in a generator
        needs_media = has_embedding or has_last_layer if name == GENERATOR else has_first_layer
        needs.append(
            PayloadNeed(
                name,
                replica_of[name] // graph.mesh(name).cp,  # what is shared comes whole; each rank takes its own
                media=not is_llm and needs_media,
                ids=is_llm and has_first_layer,
                labels=is_llm and has_last_layer,
                position_ids=any(stage.needs_position_ids for stage in unit.stages.values()),
                image_spans=next(iter(unit.stages.values())).units_with_spans,
            )
        )
    return tuple(needs)


def forward_only(graph: StageGraph) -> StageGraph:
    """Return the graph with nothing to train: its program has no backward."""
    return replace(graph, stages=tuple(replace(s, trainable=False) for s in graph.stages))


def edge_widths(graph: StageGraph, model: ModelShape) -> dict[Edge, int]:
    """Return the number of features in a row, over each edge."""
    widths: dict[Edge, int] = {}
    for edge in graph.edges:
        if edge.crosses_units:
            widths[edge] = model.edge(edge.src.unit, edge.dst.unit).width
        elif edge.src.unit == GENERATOR:
            widths[edge] = 1  # a flat state, see `state_readers`
        else:
            last_layer = graph.stage(edge.src).layers[1] - 1
            widths[edge] = model.unit(edge.src.unit).layers[last_layer].out_width
    return widths


def state_readers(graph: StageGraph, model: ModelShape) -> dict[Edge, LayerShape]:
    """Return the layer that reads the state that goes over each edge inside a generator."""
    edges = [edge for edge in graph.edges if edge.dst.unit == GENERATOR and not edge.crosses_units]
    return {edge: model.unit(GENERATOR).layers[graph.stage(edge.dst).layers[0]] for edge in edges}


def build_units(
    recipe: Recipe,
    model: ModelShape,
    graph: StageGraph,
    transport: Transport,
    sequence_parallel: Collection[str] = (),
    pretrained: WeightSource | None = None,
) -> dict[str, UnitRunner]:
    """Build this rank's stages of every unit, with their initial weights; `sequence_parallel` names units with it."""
    train = recipe.train
    options = StageOptions(transport.dtype, transport.device, train.seed, train.attention, pretrained, train.kernels)
    units: dict[str, UnitRunner] = {}
    for mesh in graph.meshes:
        if transport.rank not in mesh.ranks:
            continue
        name, groups = mesh.unit, transport.groups.units[mesh.unit]
        stages: dict[StageId, StageModule] = {}
        for stage in graph.stages:
            if stage.id.unit == name and any(transport.rank in tp_group for tp_group in stage.tp_groups):
                spec = StageSpec(
                    name, stage.layers, stage.recompute, name in sequence_parallel, tp_chunks=mesh.tp_chunks
                )
                build = build_stage if mesh.shard is None else build_stage_without_weights
                stages[stage.id] = build(recipe.model, model, spec, groups, options)
        _join_tied(stages.values())
        units[name] = UnitRunner(name, stages, groups)
        if mesh.shard is not None:
            units[name] = _shard_unit(mesh, stages, transport, options, train.grad_reduce == "bf16")
        _choose_packing(stages.values())
    return units


def _choose_packing(stages: Iterable[StageModule]) -> None:
    """Find out how the samples of guests may lie, with the weights that they have now."""
    for stage in stages:
        if isinstance(stage, GuestStage):
            stage.choose_packing()
            release_weights(stage)


def _shard_unit(
    mesh: UnitMesh,
    stages: Mapping[StageId, StageModule],
    transport: Transport,
    options: StageOptions,
    rounds_reduced: bool,
) -> UnitRunner:
    """Shard a unit's stages over its replicas, and set their weights; return what runs them.

    rounds_reduced: whether replicas send each other gradients in bf16.
    """
    groups = transport.groups.units[mesh.unit]
    sharding, param_specs = transport.groups.sharding[mesh.unit], {}
    for stage_id, stage in stages.items():
        specs = param_specs[stage_id] = parameter_specs.stage_param_specs(stage, mesh.unit, groups.tp_size)
        shard_stage(stage, sharding, options.device, options.dtype, mesh.keeps_weights, rounds_reduced)
        initialize_shards(stage, specs, sharding, groups.tp, options.seed, options.dtype, options.pretrained)
    counts = mesh.num_microbatches, mesh.keeps_weights
    return ShardedUnitRunner(mesh.unit, stages, groups, *counts, sharding, param_specs)


def _join_tied(stages: Iterable[StageModule]) -> None:
    """Give the first and the last stage of a model with tied embeddings one matrix, if this rank holds both."""
    copies = [
        (module, param)
        for stage in stages
        for module in stage.modules()
        for param in module.parameters(False)
        if _is_copy(param)
    ]
    if len(copies) > 1:
        (_, first), (last_module, _) = copies
        last_module.weight = first
        del first.shared  # type: ignore[attr-defined]


def _is_copy(param: nn.Parameter) -> bool:
    """Return whether another stage has the same weight."""
    return getattr(param, "shared", None) is not None


def _optimizer_of(recipe: Recipe, unit: UnitRunner, world: World, graph: StageGraph) -> UnitOptimizer:
    if isinstance(unit, ShardedUnitRunner):
        return _build_sharded_optimizer(recipe, unit)
    starts = {stage: graph.stage(stage).bucket_starts for stage in unit.stages}
    if unit.groups.expert_dp is None:
        return build_unit_optimizer(recipe, unit, world, starts)
    dense = build_unit_optimizer(recipe, unit, world, starts, lambda name: not is_of_expert(name))
    return JoinedOptimizers([dense, build_unit_optimizer(recipe, unit, world, starts, is_of_expert)])


def _selection_biases(recipe: Recipe, units: Mapping[str, UnitRunner]) -> list[SelectionBiases]:
    """Return what updates the selection biases of the LLM's routers on this rank, if the recipe has a rate for it."""
    moe = recipe.model.llm.moe
    if moe is None or not moe.selection_bias_rate or LLM not in units:
        return []
    return [SelectionBiases(units[LLM].stages.values(), units[LLM].groups.dp, moe.selection_bias_rate)]


def build_unit_optimizer(
    recipe: Recipe,
    unit: UnitRunner,
    world: World,
    bucket_starts: Mapping[StageId, Sequence[int]] | None = None,
    is_stepped: Callable[[str], bool] = lambda _: True,
) -> ZeroAdamW:
    """Build the optimizer of the unit's stages on this rank, with the recipe's settings for the unit.

    bucket_starts: of each stage, see `Stage.bucket_starts`; None: each has one bucket.
    is_stepped: whether it steps a parameter, by its name in its stage.
    """
    params: dict[nn.Parameter, LocalParam] = {}
    for stage in unit.stages.values():
        specs = parameter_specs.stage_param_specs(stage, unit.name, unit.groups.tp_size)
        for name, param in stage.named_parameters():
            if is_stepped(name):
                tied = _is_copy(param)
                params[param] = LocalParam(specs[name], tied, owned=not tied or 0 in stage.indices)
    buckets = {
        number: [param for param in of_bucket if param in params]
        for number, of_bucket in _gradient_buckets(unit, bucket_starts or {}).items()
    }
    groups = unit.groups.of_experts if any(is_of_expert(local.spec.name) for local in params.values()) else unit.groups
    rates, rounds_reduced = _rates_of(recipe, unit), recipe.train.grad_reduce == "bf16"
    return ZeroAdamW(buckets, params, groups, world.device, recipe.train.optimizer, rates, rounds_reduced)


def _build_sharded_optimizer(recipe: Recipe, unit: ShardedUnitRunner) -> UnitOptimizer:
    """Build the optimizer of a unit whose stages are sharded: a part for each mesh."""
    rates = _rates_of(recipe, unit)
    params, tp_group = unit.parameter_specs(), unit.groups.tp
    gathered = list(unit.stages.values()) if unit.keeps_weights else []
    settings = recipe.train.optimizer
    by_mesh: dict[DeviceMesh, dict[nn.Parameter, ParamSpec]] = {}
    for param, spec in params.items():
        by_mesh.setdefault(unit.sharding.of(spec.name), {})[param] = spec
    parts = [FullyShardedAdamW(on_mesh, mesh, tp_group, settings, rates, gathered) for mesh, on_mesh in by_mesh.items()]
    return parts[0] if len(parts) == 1 else JoinedOptimizers(parts)


def _rates_of(recipe: Recipe, unit: UnitRunner) -> UnitRates:
    stage = next(iter(unit.stages.values()))
    return unit_rates(recipe, stage.shape, stage.factory.dtype)


def _gradient_buckets(
    unit: UnitRunner, bucket_starts: Mapping[StageId, Sequence[int]]
) -> dict[BucketNumber, list[nn.Parameter]]:
    """Return the unit's parameters by model chunk and bucket, as `gradient_buckets` numbers them.

    A matrix that two layers share goes with the first of them, whose backward is the last to add to its gradient.
    """
    buckets: dict[BucketNumber, list[nn.Parameter]] = {}
    seen: set[nn.Parameter] = set()
    for chunk, (stage_id, stage) in enumerate(unit.stages.items()):
        starts = bucket_starts.get(stage_id, (0,))
        for name, param in stage.named_parameters():
            if param not in seen:
                seen.add(param)
                layer = stage.layer_of(name) - stage.indices.start
                # A stage with the head alone holds its own copy of the embedding, which counts to the head.
                layer = layer if layer >= 0 else len(stage.indices) - 1
                buckets.setdefault((chunk, bisect_right(starts, layer) - 1), []).append(param)
    return buckets
