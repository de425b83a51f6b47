"""What the settings of Megatron-LM, DeepSpeed and `transformers` are called here, for recipes that use their names."""

from collections.abc import Mapping

_ZERO = (
    "is part of parallel.placement. `unified`, `disaggregated` and `colocated` keep parameters whole in each replica "
    "and shard the optimizer (ZeRO-1). `replicated` shards what parallel.shard says: `all` everything (ZeRO-3), "
    "1 nothing; with parallel.zero: 1 the optimizer alone"
)
_RECOMPUTE = "is parallel.llm.recompute and parallel.vision.recompute: auto, none or all"
_OFFLOAD = "is parallel.llm.offload and parallel.vision.offload: none, inputs, all or auto"

# The name, without case, `-` and `_` -> what follows it in a sentence.
_HERE: Mapping[str, str] = {
    "zerostage": _ZERO,
    "usedistributedoptimizer": _ZERO,
    "tensormodelparallelsize": "is tp of each unit, such as parallel.llm.tp",
    "tensorparallelsize": "is tp of each unit, such as parallel.llm.tp",
    "pipelinemodelparallelsize": "is pp of each unit, such as parallel.llm.pp",
    "pipelineparallelsize": "is pp of each unit, such as parallel.llm.pp",
    "virtualpipelinemodelparallelsize": "is parallel.llm.vpp, the number of chunks of layers on each pipeline rank",
    "sequenceparallel": "is parallel.llm.sp",
    "microbatchsize": "has no setting: a microbatch is one packed group of at most data.seq_len tokens",
    "perdevicetrainbatchsize": "has no setting: a microbatch is one packed group of at most data.seq_len tokens",
    "gradientaccumulationsteps": "follows from train.global_batch, the groups of a step over all replicas",
    "globalbatchsize": "is train.global_batch, in packed groups of at most data.seq_len tokens",
    "cpuoffloading": _OFFLOAD,
    "activationoffloading": _OFFLOAD,
    "enableactivationoffloading": _OFFLOAD,
    "cpucheckpointing": _OFFLOAD,
    "recomputegranularity": _RECOMPUTE,
    "gradientcheckpointing": _RECOMPUTE,
}


def name_here(name: str) -> str | None:
    """Return what a setting of another trainer is called here, as the rest of a sentence, or None."""
    return _HERE.get(name.lower().replace("-", "").replace("_", ""))
