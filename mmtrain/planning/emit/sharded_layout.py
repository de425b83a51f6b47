"""What two trainers have in common that shard whole models over all ranks (FSDP2)."""

from collections.abc import Iterator
from dataclasses import dataclass

from mmtrain.planning.artifact.plan import UnitPlan
from mmtrain.planning.emit.common_inexpressible import (
    data_inexpressible,
    moments_inexpressible,
    router_inexpressible,
)
from mmtrain.planning.emit.emitted_plan import Inexpressible, PlannedJob
from mmtrain.program.ir.graph import LLM


@dataclass(frozen=True)
class ShardedSizes:
    """Replicas that hold one copy of the model together, and copies.

    shard: data-parallel replicas of a copy, without those that share sequences.
    """

    shard: int
    copies: int


def sharded_sizes(llm: UnitPlan) -> ShardedSizes:
    """Return how replicas share copies of a plan without `problems`."""
    assert llm.shard is not None
    shard = max(1, llm.shard // llm.cp)
    return ShardedSizes(shard, llm.dp // shard)


def sharded_problems(job: PlannedJob) -> Iterator[str]:
    """Say what no trainer that shards whole models can run."""
    plan, llm = job.plan, job.llm
    if plan.placement != "replicated":
        yield f"the placement is {plan.placement}; every rank runs the whole model there (replicated)"
        return
    if job.recipe.model.generator is not None:
        yield "the model has an image generator"
    if llm.shard is None:
        yield "weights and gradients are whole and only the optimizer is sharded (zero 1)"
    elif llm.shard > 1 and llm.shard % llm.cp:
        yield f"a copy is shared by {llm.shard} replicas, no multiple of the {llm.cp} that share sequences"
    if llm.dispatch not in (None, "none"):
        yield f"samples or images move between ranks to make them even (dispatch {llm.dispatch})"
    if plan.schedule.kind != "1f1b":
        yield f"encoders run before the LLM for all mini-batches of a step (schedule {plan.schedule.kind})"
    elif len(set(plan.schedule.num_microbatches.values())) > 1:
        yield f"units have different numbers of microbatches ({plan.schedule.num_microbatches})"
    if any(unit.offload != "none" for unit in plan.units.values()):
        yield "activations wait in host memory (offload)"
    if llm.cp > 1 and llm.cp_split != "even":
        yield f"context parallelism cuts the longest sequences alone (cp_split {llm.cp_split})"


def sharded_options(job: PlannedJob) -> tuple[str, ...]:
    """Return options of `mmtrain plan` with which plans are found that are free of `sharded_problems`."""
    units = [*job.recipe.model.all_encoders, LLM]
    offload = [
        f"--set parallel.{_path(job, unit)}.offload=none" for unit in units if job.plan.units[unit].offload != "none"
    ]
    zero = ["--set parallel.zero=3"] if job.recipe.parallel.zero == 1 or job.llm.shard is None else []
    cp = ["--set parallel.llm.cp_split=even"] if job.llm.cp > 1 else []
    return (
        "--placement replicated",
        "--set parallel.dispatch=none",
        "--set parallel.schedule=1f1b",
        *zero,
        *offload,
        *cp,
    )


def _path(job: PlannedJob, unit: str) -> str:
    return f"encoders.{unit}" if unit in job.recipe.model.encoders else unit


def recomputes_all(job: PlannedJob) -> bool:
    """Return whether the trainer's only choice, all blocks or none, is all."""
    return any(unit.num_recomputed for unit in job.plan.units.values())


def sharded_inexpressible(job: PlannedJob) -> Iterator[Inexpressible]:
    """Say what of a plan these trainers leave out."""
    blocks = {name: job.recipe.model.unit(name) for name in job.plan.units}
    for name, unit in job.plan.units.items():
        num_layers = unit.stages[-1].layers[1]
        kept = num_layers - unit.num_recomputed
        if recomputes_all(job) and kept > num_layers - blocks[name].layers:
            yield Inexpressible(
                f"{unit.num_recomputed} of {num_layers} layers of {name} are recomputed", "all blocks are", True
            )
    if any(unit.recompute_activation_function for unit in job.plan.units.values()):
        yield Inexpressible(
            "activation functions run again in backward", "their outputs are kept, which takes more memory"
        )
    if job.llm.tp_chunks > 1:
        yield Inexpressible(
            f"tensor-parallel linears run in {job.llm.tp_chunks} chunks of tokens", "they run whole", lengthens=True
        )
    yield from moments_inexpressible(job)
    yield from router_inexpressible(job)
    yield from data_inexpressible(job)
