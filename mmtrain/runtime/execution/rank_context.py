"""A job: everything one rank needs to execute a plan, built once and run every step."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from mmtrain.costs import Precision
from mmtrain.data.loading.batch_builder import PayloadNeed, StepData
from mmtrain.models import parameter_specs as params
from mmtrain.models.build_stage import StageOptions, build_stage
from mmtrain.models.megatron.zero_adamw import LocalParam, ZeroAdamW
from mmtrain.models.model_shape import ModelShape, build_model_shape
from mmtrain.models.stage_inputs import EncoderInput, TextInput, UnitInput
from mmtrain.models.stage_module import StageModule, StageSpec
from mmtrain.plan.artifact.plan import Plan
from mmtrain.plan.artifact.plan_graph import stage_graph
from mmtrain.plan.artifact.plan_precision import plan_precision
from mmtrain.program import Edge, Microbatch, Program, StageGraph, StageId, Step, build_program, step_loads
from mmtrain.program.verify.send_window import send_window
from mmtrain.recipe import Recipe
from mmtrain.runtime.execution.activity import Activity
from mmtrain.runtime.execution.broker import Broker
from mmtrain.runtime.execution.channel_probe import probe_channels
from mmtrain.runtime.execution.executor import Executor, StepInput, StepOutcome
from mmtrain.runtime.execution.fault_points import FaultPoints
from mmtrain.runtime.execution.optimizer import Optimizer
from mmtrain.runtime.execution.precision import compute_dtype
from mmtrain.runtime.execution.process_groups import ProcessGroups, build_groups
from mmtrain.runtime.execution.recorder import StepRecorder, clock_for
from mmtrain.runtime.execution.unit import UnitRunner
from mmtrain.runtime.world import World

LLM = "llm"


@dataclass(frozen=True)
class RankContext:
    """One rank's units, optimizer and executors, and what they were built from."""

    recipe: Recipe
    world: World
    shape: ModelShape
    graph: StageGraph
    program: Program
    groups: ProcessGroups
    units: Mapping[str, UnitRunner]
    optimizer: Optimizer
    train_executor: Executor
    validation_executor: Executor  # the same stages, forward only
    precision: Precision  # as the plan states it
    dtype: torch.dtype  # the same, of torch
    activity: Activity
    faults: FaultPoints

    @property
    def dp(self) -> dict[str, int]:
        """Data-parallel size of every unit."""
        return {mesh.unit: mesh.dp for mesh in self.graph.meshes}

    @property
    def num_microbatches(self) -> dict[str, int]:
        """Microbatches of each replica of every unit in one step."""
        return {mesh.unit: mesh.num_microbatches for mesh in self.graph.meshes}

    @property
    def needs(self) -> tuple[PayloadNeed, ...]:
        """The payload this rank computes on."""
        return payload_needs(self.graph, self.units, self.world.rank)

    def train(self, data: StepData, lr: float) -> StepOutcome:
        """Run one optimizer step."""
        return self.train_executor.run(self._feed(data, lr))

    def validate(self, data: StepData) -> StepOutcome:
        """Compute the loss of a global batch and change nothing."""
        return self.validation_executor.run(self._feed(data, 0.0))

    def _feed(self, data: StepData, lr: float) -> StepInput:
        inputs = unit_inputs(data, self.world.device, self.dtype)
        loss_scale = {LLM: 1.0 / max(1, data.meta.total_targets)}
        return StepInput(inputs, step_loads(self.graph, data.meta), loss_scale, lr, data.meta.step)


def build_rank_context(
    recipe: Recipe, plan: Plan, world: World, activity: Activity | None = None, faults: FaultPoints | None = None
) -> RankContext:
    """Build what this rank of the plan runs: groups, stages, optimizer, executors.

    The program is checked before anything is built, and every channel is tried before anything is trained.
    """
    activity, faults = activity or Activity(recorder=StepRecorder(clock_for(world.device))), faults or FaultPoints()
    model = build_model_shape(recipe)
    graph = stage_graph(plan, model)
    kind, order = plan.schedule.kind, plan.schedule.order
    program, forward_program = (build_program(g, kind=kind, order=order) for g in (graph, forward_only(graph)))
    groups = build_groups(graph, world)
    actions = program.for_rank(world.rank)
    probe_channels(actions, groups, world)
    precision = plan_precision(plan, recipe)
    dtype = compute_dtype(precision, world.device)
    units = {
        mesh.unit: build_unit(recipe, model, graph, mesh.unit, plan.units[mesh.unit].sp, groups, world, dtype)
        for mesh in graph.meshes
        if world.rank in mesh.ranks
    }
    optimizer = Optimizer(
        {name: build_unit_optimizer(recipe, unit, world) for name, unit in units.items()},
        recipe.train.optimizer,
        world,
        groups.tied_embeddings,
    )
    widths = edge_widths(graph, model)
    sharers = {name: unit.tp for name, unit in plan.units.items() if unit.sp}
    forward_actions = [a for a in forward_program.for_rank(world.rank) if not isinstance(a, Step)]
    brokers = [
        Broker(p.graph, a, world.rank, groups, widths, sharers, send_window(p), world.device, dtype, activity)
        for p, a in ((program, actions), (forward_program, forward_actions))
    ]
    return RankContext(
        recipe,
        world,
        model,
        graph,
        program,
        groups,
        units,
        optimizer,
        Executor(graph, actions, units, brokers[0], optimizer, activity, faults),
        Executor(forward_program.graph, forward_actions, units, brokers[1], None, activity),
        precision,
        dtype,
        activity,
        faults,
    )


def payload_needs(graph: StageGraph, units: Mapping[str, UnitRunner], rank: int) -> tuple[PayloadNeed, ...]:
    """The payload that a rank with these units computes on: media and ids for first layers, labels for the head."""
    # Not the rank in the unit's data-parallel group, which torch orders by global rank, whatever the mesh says.
    replica_of = {stage.unit: replica for stage, replica in graph.held_by(rank)}
    return tuple(
        PayloadNeed(
            name,
            replica_of[name],
            media=name != LLM and any(0 in s.indices for s in unit.stages.values()),
            ids=name == LLM and any(0 in s.indices for s in unit.stages.values()),
            labels=name == LLM and any(len(s.shape.layers) - 1 in s.indices for s in unit.stages.values()),
        )
        for name, unit in units.items()
    )


def unit_inputs(data: StepData, device: torch.device, dtype: torch.dtype) -> dict[Microbatch, UnitInput]:
    """Bring a step's payload to the device, as the inputs of stages."""
    inputs: dict[Microbatch, UnitInput] = {}
    for (replica, index), image in data.vision.items():
        patches = None if image.patches is None else torch.from_numpy(image.patches).to(device, dtype)
        inputs[Microbatch("vision", replica, index)] = EncoderInput(image.rows, image.cols, patches)
    for (replica, index), clips in data.audio.items():
        mels = None if clips.mels is None else torch.from_numpy(clips.mels).to(device, dtype)
        columns = (1,) * len(clips.frames)
        inputs[Microbatch("audio", replica, index)] = EncoderInput(clips.frames, columns, mels)
    for (replica, index), text in data.text.items():
        ids, labels = (None if a is None else torch.from_numpy(a).to(device) for a in (text.ids, text.labels))
        places = {unit: torch.from_numpy(at).to(device) for unit, at in text.feature_positions.items()}
        inputs[Microbatch(LLM, replica, index)] = TextInput(text.lengths, ids, labels, places)
    return inputs


def forward_only(graph: StageGraph) -> StageGraph:
    """The same graph with nothing to train: its program has no backward."""
    return replace(graph, stages=tuple(replace(s, trainable=False) for s in graph.stages))


def edge_widths(graph: StageGraph, model: ModelShape) -> dict[Edge, int]:
    """Features in a row of what flows along each edge."""
    return {
        edge: model.edge(edge.src.unit, edge.dst.unit).width
        if edge.crosses_units
        else model.unit(edge.src.unit).layers[graph.stage(edge.src).layers[1] - 1].out
        for edge in graph.edges
    }


def build_unit(
    recipe: Recipe,
    model: ModelShape,
    graph: StageGraph,
    name: str,
    sequence_parallel: bool,
    groups: ProcessGroups,
    world: World,
    dtype: torch.dtype,
) -> UnitRunner:
    """Build this rank's stages of a unit, with their initial weights."""
    options = StageOptions(dtype, world.device, recipe.train.seed, recipe.train.attention)
    stages: dict[StageId, StageModule] = {}
    for stage in graph.stages:
        if stage.id.unit == name and any(world.rank in tp_group for tp_group in stage.tp_groups):
            spec = StageSpec(name, stage.layers, stage.recompute, sequence_parallel)
            stages[stage.id] = build_stage(recipe.model, model, spec, groups.units[name], options)
    _join_tied(stages.values())
    return UnitRunner(name, stages, groups.units[name])


def _join_tied(stages: Iterable[StageModule]) -> None:
    """Give the first and the last stage of a model with tied embeddings one matrix, where one rank holds both."""
    copies = [(module, p) for s in stages for module in s.modules() for p in module.parameters(False) if _is_copy(p)]
    if len(copies) > 1:
        (_, kept), (module, _) = copies
        module.weight = kept
        del kept.shared  # type: ignore[attr-defined]


def _is_copy(param: nn.Parameter) -> bool:
    """Whether another stage has the same weight."""
    return getattr(param, "shared", None) is not None


def build_unit_optimizer(recipe: Recipe, unit: UnitRunner, world: World) -> ZeroAdamW:
    """The optimizer of the unit's stages on this rank, with the recipe's settings for it."""
    held: dict[nn.Parameter, LocalParam] = {}
    for stage in unit.stages.values():
        specs = params.stage_param_specs(stage, unit.name, unit.groups.tp_size)
        for name, param in stage.named_parameters():
            tied = _is_copy(param)
            held[param] = LocalParam(specs[name], tied, owned=not tied or 0 in stage.indices)
    settings = getattr(recipe.model, unit.name)
    modules, optimizer = nn.ModuleList(unit.stages.values()), recipe.train.optimizer
    weight_decay = optimizer.weight_decay if settings.weight_decay is None else settings.weight_decay
    return ZeroAdamW(modules, held, unit.groups, world.device, optimizer, settings.lr_scale, weight_decay)
