"""Build one rank's part of a plan, and bring it to where the run continues."""

from contextlib import closing, nullcontext
from dataclasses import dataclass

import torch

from mmtrain.balance import StepTargets
from mmtrain.data import GroupStream
from mmtrain.models.kernels.choice import kernel_choices
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.artifact.plan_memory import DeviceMemory, planned_loss
from mmtrain.runtime.execution.activity import BUILDING, INDEXING, RESTORING
from mmtrain.runtime.execution.attention_choice import describe_attention
from mmtrain.runtime.execution.rank_context import RankContext, build_rank_context
from mmtrain.runtime.resilience.out_of_memory import OutOfMemoryReport, predicted_peak_gib, smallest_device_memory
from mmtrain.runtime.training.choose_plan import ChosenPlan
from mmtrain.runtime.training.hooks.best_checkpoint import BestTracker
from mmtrain.runtime.training.hooks.replanning import share_recorded_costs
from mmtrain.runtime.training.rank_session import RankSession
from mmtrain.runtime.training.restore_run import RunPosition, restore_run
from mmtrain.runtime.training.run_copies import RunCopies, join_copies
from mmtrain.runtime.training.start_run import introduce_run, share_step_targets
from mmtrain.runtime.training.start_weights import (
    introduce_guest,
    introduce_start_weights,
    open_start_weights,
    require_fitting_weights,
    start_optimizer,
)
from mmtrain.runtime.training.step_metrics import StepMetricsReducer
from mmtrain.runtime.world import torch_seed


@dataclass(frozen=True)
class RankRun:
    """A run on one rank, ready for its first step on a plan."""

    session: RankSession
    rank_context: RankContext
    chosen: ChosenPlan
    position: RunPosition
    device_memory: DeviceMemory  # of the smallest device, before the model was built on it
    stream: GroupStream
    targets: StepTargets  # loads that the samples of a step are to have on each rank
    reducer: StepMetricsReducer
    copies: RunCopies | None  # in the memory of its nodes, with `train.peer_copies`

    @property
    def plan(self) -> Plan:
        """The plan of which this rank executes its part."""
        return self.chosen.plan

    @property
    def has_steps_left(self) -> bool:
        """Whether any step is to be trained."""
        best = self.position.best
        ended = best is not None and best.early_end() is not None
        return not ended and self.position.first_step < self.rank_context.recipe.train.num_steps

    @property
    def memory_report(self) -> OutOfMemoryReport:
        """The report to raise if this rank runs out of memory."""
        world = self.rank_context.world
        peak_gib = predicted_peak_gib(world.rank, self.plan.predicted.peak_memory_gib)
        return OutOfMemoryReport(world, self.rank_context.activity, self.session.index, peak_gib)


def build_run(session: RankSession, chosen: ChosenPlan) -> RankRun:
    """Build this rank's part of the plan, and restore the newest checkpoint if the run resumes.

    All ranks call this together. `patient_world` waits for slow ranks without a time limit, `world` does not. Raises
    UserError if the weights do not fit the model, or if the checkpoint was written with other settings.
    """
    request, world, patient_world = session.request, session.world, session.patient_world
    activity, console, recipe = session.activity, session.console, session.request.recipe
    activity.start(BUILDING)
    start_weights = open_start_weights(request, patient_world, activity, console)
    with nullcontext() if start_weights is None else closing(start_weights):
        patient_world.all_gather(None)  # from here on no rank is late: the watchdog times connecting
        memory = smallest_device_memory(recipe, chosen.plan.hardware, patient_world)
        rank_context = build_rank_context(recipe, chosen.plan, world, activity, request.faults, start_weights, memory)
        torch.manual_seed(torch_seed(recipe.train.seed))  # after building, which may draw differently on each rank
        require_fitting_weights(start_weights, recipe, patient_world)
        start_optimizer(rank_context.optimizer, start_weights, recipe)
    if start_weights is not None:
        introduce_start_weights(console, recipe, start_weights)
    position = RunPosition(best=BestTracker.of(recipe))
    copies = join_copies(session)
    if request.resume:
        activity.start(RESTORING)
        position = restore_run(session, rank_context, chosen.plan, copies)
    activity.start(INDEXING)
    attention = describe_attention(recipe, rank_context.shape, world.device, rank_context.dtype)
    loss = planned_loss(chosen.plan, rank_context.shape)
    llm = recipe.model.llm
    kernels = kernel_choices(
        recipe.train.kernels,
        world.device,
        rank_context.dtype,
        loss,
        has_experts=llm.moe is not None,
        has_delta_nets=llm.delta_net is not None,
    )
    introduce_guest(console, recipe, rank_context)
    introduce_run(console, request, chosen, session.index, position.first_step, attention, kernels)
    stream = GroupStream.of(recipe, session.index)
    targets = share_step_targets(patient_world, recipe, chosen.plan, session.index)
    recorded_costs = share_recorded_costs(patient_world, request)
    sources = session.index.sources
    if sources is not None and len(sources.names) == 1:
        sources = None
    reducer = StepMetricsReducer(
        rank_context, stream, chosen.plan.hardware, position.skipped_positions, recorded_costs, sources
    )
    return RankRun(session, rank_context, chosen, position, memory, stream, targets, reducer, copies)
