"""Our programs beside Megatron-core's own schedules: the same stages and microbatches, the same loss and gradients.

Its schedules know one chain of stages and tensors of three dimensions, so this is an LLM on text alone. They run on
gloo once "cuda" means the CPU (`optimizer_scope`); microbatches differ in length, so the shapes of all messages are
exchanged too. The interleaved schedule needs overlapped messages: without them it posts what goes each way round two
ranks that are neighbours on both sides in another order on either rank, and takes one message for the other
(megatron-core 0.16.1, pp 2 with vpp 2 on gloo: a size that does not fit, or where sizes are equal a wrong gradient).
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from mmtrain.models.megatron.compat import no_cuda_graphs, optimizer_scope
from mmtrain.models.optim.parameter_specs import NamedShard
from mmtrain.models.stage.stage_inputs import UnitInput
from mmtrain.models.stage.stage_module import StageModule
from mmtrain.planning import Plan
from mmtrain.program import Microbatch
from mmtrain.recipe import Recipe
from mmtrain.runtime.execution.process_groups import build_groups
from mmtrain.runtime.execution.rank_context import build_rank_context, build_units
from mmtrain.runtime.execution.unit import UnitRunner
from mmtrain.runtime.execution.unit_inputs import unit_inputs
from mmtrain.runtime.world import World
from tests.distributed import run_ranks
from tests.flow.cases import Mesh, plan, recipe, step_data
from tests.flow.equality import assert_close
from tests.flow.gather import copy, whole

TEXT_ALONE = {"model__vision": None, "model__llm__layers": 6, "train__global_batch": 8}  # the LLM has eight layers
Result = tuple[float, dict[str, Tensor]]


class Chunk(nn.Module):
    """A stage as Megatron-core's schedules see a model: it is told its input, and hidden states are (T, 1, hidden)."""

    def __init__(self, stage: StageModule, config: object, vp_stage: int | None) -> None:
        super().__init__()
        self.stage, self.config, self.vp_stage, self.model_type = stage, config, vp_stage, None
        self.entering: Tensor | None = None

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        [self.entering] = tensors

    def forward(self, inputs: UnitInput) -> Tensor:
        hidden = self.stage(None if self.entering is None else self.entering.squeeze(1), inputs)
        return hidden if hidden.ndim == 0 else hidden.unsqueeze(1)


def _ours_and_theirs(settings: Recipe, wanted: Plan) -> tuple[float, list[NamedShard], Result]:
    """Run the first step by the program and by Megatron-core's schedule, from the same weights."""
    world = World(torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.device("cpu"))
    job = build_rank_context(settings, wanted, world)
    transport = replace(job.transport, groups=build_groups(job.graph, world))
    runner = build_units(settings, job.shape, job.graph, transport)["llm"]
    data = step_data(job, 1, texts_between=True)
    inputs = unit_inputs(data, {name: unit.stages.values() for name, unit in job.units.items()}, settings)
    found = _theirs(runner, inputs, data.meta.total_targets, wanted.units["llm"].vpp)
    loss = job.train(data, 0.0).loss
    return loss, [copy(g) for g in job.optimizer.units["llm"].gradients()], found


def _theirs(runner: UnitRunner, inputs: dict[Microbatch, UnitInput], total_targets: int, vpp: int) -> Result:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Apex is not installed", category=UserWarning)
        from megatron.core.pipeline_parallel import schedules
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
        from megatron.core.transformer import (
            TransformerConfig,
            multi_token_prediction,  # noqa: F401 - imported in every forward
        )

    groups, model = runner.groups, next(iter(runner.stages.values())).shape
    pp = groups.pp.size()
    config = TransformerConfig(
        num_layers=len(model.layers),
        hidden_size=model.layers[0].out,
        num_attention_heads=model.layers[1].attention.heads,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        microbatch_group_size_per_vp_stage=pp,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the default knows no variable lengths
        batch_p2p_comm=False,
        overlap_p2p_comm=vpp > 1,
        **no_cuda_graphs(),
    )
    microbatches = [inputs[mb] for mb in sorted(inputs)]
    chunks = [Chunk(s, config, k if vpp > 1 else None) for k, s in enumerate(runner.stages.values())]

    def forward_step(
        data: Iterator[UnitInput], model: Chunk
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
        return model(next(data)), lambda loss: (loss * len(microbatches) / total_targets, loss.detach() / total_targets)

    schedule = (
        schedules.forward_backward_pipelining_with_interleaving
        if vpp > 1
        else schedules.forward_backward_pipelining_without_interleaving
    )
    with optimizer_scope(torch.device("cpu")):
        losses = schedule(
            forward_step_func=forward_step,
            data_iterator=[iter(microbatches) for _ in chunks],
            model=chunks,
            num_microbatches=len(microbatches),
            seq_length=1,
            micro_batch_size=1,
            p2p_communicator=P2PCommunicator(groups.pp, config),
            pg_collection=groups.collection(),
        )
    gradients = {
        f"llm.{name}": p.grad for chunk in chunks for name, p in chunk.stage.named_parameters() if p.grad is not None
    }
    return float(sum(losses)), gradients


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh((3,), (0, 1)),
        Mesh((2, 4, 5), (0, 1, 2, 3)),
        Mesh((2, 4, 5), (0, 1), vpp=2),
        Mesh((1, 2, 3, 4, 5, 6, 7), (0, 1, 2, 3), vpp=2),
    ],
    ids=["pp2", "pp4", "pp2 vpp2", "pp4 vpp2"],
)
def test_megatron_core_computes_the_same(mesh: Mesh) -> None:
    settings = recipe(**TEXT_ALONE)
    ranks = run_ranks(len(mesh.ranks), _ours_and_theirs, settings, plan(settings, llm=mesh))
    theirs = {name: gradient for _, _, (_, found) in ranks for name, gradient in found.items()}
    assert sum(loss for loss, _, _ in ranks) == pytest.approx(sum(loss for _, _, (loss, _) in ranks), rel=1e-6)
    assert_close(whole([g for _, gradients, _ in ranks for g in gradients]), theirs)
