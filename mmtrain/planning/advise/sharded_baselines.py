"""Make the plans of other trainers that run the whole model on every rank: FSDP and DDP, without dispatch.

Each rank computes the samples that the stream deals to it, encoders and LLM alike, and encoders run in every
mini-batch. Both are plans of `replicated`, priced and simulated by the same code as the planner's own.
"""

from collections.abc import Mapping

from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.search.mesh_enumeration import replicated_meshes
from mmtrain.planning.search.replicated import fit_replicated
from mmtrain.planning.space.candidate import Candidate, MeshAssignment
from mmtrain.planning.space.sample_batches import num_microbatches_of
from mmtrain.program.ir.graph import LLM
from mmtrain.recipe.settings.parallel_settings import ParallelSettings

FSDP_BASELINE, DDP_BASELINE = "fsdp", "ddp"
SHARDED_RULES: Mapping[str, str] = {
    FSDP_BASELINE: "all units sharded over all ranks (ZeRO-3), nothing balanced between them",
    DDP_BASELINE: "all units whole on every rank, nothing balanced between them",
}


def plan_sharded_baseline(name: str, evaluator: Evaluator) -> Candidate | None:
    """Return the baseline of this name on as many ranks as the problem may use, simulated.

    None where the recipe leaves no such plan, or where it does not fit. TP groups are as small as it allows.
    """
    problem = evaluator.problem
    smallest = (next(replicated_meshes(problem.choices, count), None) for count in problem.cluster.rank_counts)
    possible = [meshes for meshes in smallest if meshes is not None]
    if "replicated" not in problem.constraints.placements or not possible:
        return None
    meshes = max(possible, key=lambda meshes: meshes[LLM].ranks)
    num_replicas = meshes[LLM].num_replicas
    shard = num_replicas if name == FSDP_BASELINE else 1
    if not _is_allowed(shard, num_replicas, problem.recipe.parallel):
        return None
    numbers = num_microbatches_of(evaluator.layer_costs.batch_split({unit: mesh.dp for unit, mesh in meshes.items()}))
    candidate = evaluator.enumerated(MeshAssignment("replicated", meshes, numbers, shard, "none"))
    fitted = fit_replicated(candidate, evaluator)
    return evaluator.simulate(fitted) if isinstance(fitted, Candidate) else None


def _is_allowed(shard: int, num_replicas: int, parallel: ParallelSettings) -> bool:
    """Return whether the recipe's settings leave a plan with such shards, no dispatch and encoders in mini-batches."""
    shards_allowed = {"auto": shard, "all": num_replicas}.get(str(parallel.shard), parallel.shard)
    return (
        parallel.zero == 3
        and shard == shards_allowed
        and parallel.dispatch in ("auto", "none")
        and parallel.schedule in ("auto", "1f1b")
        and parallel.exchange == "all_to_all"
    )
