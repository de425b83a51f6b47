"""Plans as a shell script that starts MegatronMIMO of Megatron-Bridge, whose modules have ranks of their own."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from mmtrain.planning.artifact.layout import MeshSize
from mmtrain.planning.artifact.plan import UnitPlan
from mmtrain.planning.emit.accepted_settings import AcceptedSettings
from mmtrain.planning.emit.common_inexpressible import (
    freeze_inexpressible,
    moments_inexpressible,
    optimizer_inexpressible,
    router_inexpressible,
    schedule_inexpressible,
)
from mmtrain.planning.emit.emitted_plan import EmittedSetting, Inexpressible, OtherTrainer, PlannedJob, SettingGroup
from mmtrain.planning.emit.megatron_layout import VISION, core_problems, is_even
from mmtrain.planning.emit.shell_script import ShellScript, ShellVariable, shell_text

SCRIPT = "examples/megatron_mimo/qwen35_vl/finetune_qwen35_vl.py"
LANGUAGE, IMAGES = "language", "images"  # its names of the modules


def _problems(job: PlannedJob) -> Iterator[str]:
    encoders = list(job.recipe.model.all_encoders)
    if encoders != [VISION] or job.recipe.model.generator is not None:
        yield f"the model has {', '.join(job.plan.units)}; its script has an LLM and one image encoder"
        return
    if job.plan.placement != "disaggregated":
        yield f"the placement is {job.plan.placement}; modules have ranks of their own there (disaggregated)"
        return
    llm, vision = job.llm, job.plan.units[VISION]
    yield from core_problems(job)
    if vision.pp > 1:
        yield f"the encoder has {vision.pp} pipeline ranks; its script builds it whole"
    if llm.vpp > 1 or not is_even(llm, job.recipe.model.llm.layers):
        yield f"the LLM has {llm.vpp} chunks on a rank, or unequal numbers of blocks; its script divides them evenly"
    if llm.dp % vision.dp:
        yield f"the encoder's dp {vision.dp} does not divide the LLM's {llm.dp}, whose samples it encodes"
    if len(set(job.plan.schedule.num_microbatches.values())) > 1:
        yield f"units have different numbers of microbatches ({job.plan.schedule.num_microbatches})"
    if any(unit.num_recomputed or unit.recompute_activation_function for unit in job.plan.units.values()):
        yield "layers are recomputed, for which its script has no argument"
    if llm.sp or vision.sp:
        yield "sequence parallelism is on, for which its script has no argument"
    if llm.tp_chunks > 1 or vision.tp_chunks > 1:
        yield "tensor-parallel linears run in chunks of tokens, for which its script has no argument"
    if llm.cp > 1 or llm.ep > 1:
        yield "ranks share sequences or experts, which its script was not written for"
    if job.recipe.train.lora is not None:
        yield "adapters are trained (train.lora), which megatron-bridge and automodel have"
    if not _tile_the_ranks(llm, vision, job.plan.world_size):
        yield "the ranks of a unit are no range"


def _tile_the_ranks(llm: UnitPlan, vision: UnitPlan, world_size: int) -> bool:
    ranges = [list(range(min(unit.ranks), max(unit.ranks) + 1)) for unit in (llm, vision)]
    return [sorted(llm.ranks), sorted(vision.ranks)] == ranges and sum(map(len, ranges)) == world_size


def _fitting_options(job: PlannedJob) -> tuple[str, ...]:
    if VISION not in job.plan.units:
        return ("`--emit megatron-bridge` in place of it",)
    blocks = job.recipe.model.llm.layers
    sizes = _sizes_that_divide(job) if job.plan.placement == "disaggregated" else None
    pp = next(size for size in range(job.llm.pp, 0, -1) if blocks % size == 0) if sizes is None else sizes.llm.pp
    of_both = "vpp: 1, sp: false, tp_overlap: false, recompute: none"
    of_llm = f"pp: {pp}, layers_per_chunk: {[blocks // pp] * pp}, {of_both}"
    of_vision = f"pp: 1, {of_both}"
    if sizes is not None:
        of_llm = f"tp: {sizes.llm.tp}, dp: {sizes.llm.dp}, {of_llm}"
        of_vision = f"tp: {sizes.vision.tp}, dp: {sizes.vision.dp}, {of_vision}"
    return (
        "--placement disaggregated",
        f"--set 'parallel.llm={{{of_llm}}}'",
        f"--set 'parallel.vision={{{of_vision}}}'",
    )


@dataclass(frozen=True)
class _Sizes:
    llm: MeshSize
    vision: MeshSize


def _sizes_that_divide(job: PlannedJob) -> _Sizes | None:
    """Return meshes on all ranks where the encoder's dp divides the LLM's; None if the plan's do already.

    They are nearest to the plan's share of ranks for the encoder, with its pipeline and tensor parallelism if possible.
    """
    llm, vision, world_size = job.llm, job.plan.units[VISION], job.plan.world_size
    if llm.dp % vision.dp == 0:
        return None
    num_blocks = job.recipe.model.llm.layers
    pps = [size for size in range(llm.pp, 0, -1) if num_blocks % size == 0]
    for tp_of_llm, tp, pp in product(sorted({llm.tp, 1}, reverse=True), sorted({vision.tp, 1}, reverse=True), pps):
        found = []
        for dp in range(1, world_size):
            left = world_size - tp_of_llm * pp * dp
            if left > 0 and left % tp == 0 and dp % (left // tp) == 0 and job.plan.num_groups % dp == 0:
                found.append(_Sizes(MeshSize(tp_of_llm, pp, dp), MeshSize(tp, 1, left // tp)))
        if found:
            return min(found, key=lambda sizes: abs(sizes.vision.ranks - len(vision.ranks)))
    return None


def _inexpressible(job: PlannedJob) -> Iterator[Inexpressible]:
    yield from schedule_inexpressible(job, ("cosine",))
    yield from moments_inexpressible(job)
    yield from optimizer_inexpressible(job)
    yield from router_inexpressible(job)
    yield Inexpressible(
        f"samples are packed into groups of up to {job.seq_len} tokens that cost the replicas of a step the same",
        "each sample is padded to a sequence of its own, so a step has as many samples as the plan has groups",
        lengthens=True,
    )
    yield from freeze_inexpressible(job)


def _component(name: str, unit: UnitPlan) -> str:
    return f"{name}=tp={unit.tp},pp={unit.pp},cp={unit.cp},dp={unit.dp},rank_offset={min(unit.ranks)}"


def _parallel_settings(job: PlannedJob) -> Iterator[EmittedSetting]:
    yield EmittedSetting("--component", [_component(LANGUAGE, job.llm)])
    yield EmittedSetting("--component", [_component(IMAGES, job.plan.units[VISION])])
    yield EmittedSetting("--micro-batch-size", job.llm.dp, "of all replicas of the LLM: one group each")
    yield EmittedSetting("--global-batch-size", job.plan.num_groups, "groups")
    yield EmittedSetting("--seq-length", job.seq_len)
    if job.plan.precision == "fp32":
        yield EmittedSetting("--fp32", True)


def _training_settings(job: PlannedJob) -> Iterator[EmittedSetting]:
    train, optimizer = job.recipe.train, job.recipe.train.optimizer
    vision = job.recipe.model.all_encoders[VISION]
    yield EmittedSetting("--train-iters", train.num_steps)
    yield EmittedSetting("--lr", optimizer.lr)
    yield EmittedSetting("--min-lr", optimizer.min_lr)
    yield EmittedSetting("--lr-decay-iters", train.num_steps)
    yield EmittedSetting("--lr-warmup-iters", optimizer.num_warmup_steps(train.num_steps))
    yield EmittedSetting("--adam-beta1", optimizer.betas[0])
    yield EmittedSetting("--adam-beta2", optimizer.betas[1])
    yield EmittedSetting("--weight-decay", optimizer.weight_decay)
    yield EmittedSetting("--start-weight-decay", optimizer.weight_decay)
    yield EmittedSetting("--end-weight-decay", optimizer.weight_decay)
    yield EmittedSetting("--clip-grad", optimizer.clip_norm or 0.0)
    yield EmittedSetting("--freeze-llm", _word(job.recipe.model.llm.freeze))
    yield EmittedSetting("--freeze-vision", _word(vision.freeze))
    yield EmittedSetting("--freeze-projector", _word(vision.projector.freeze))
    yield EmittedSetting("--checkpoint-interval", train.checkpoint.every or train.num_steps)
    yield EmittedSetting("--seed", train.seed)


def _word(is_on: bool) -> str:
    return str(is_on).lower()


def _own_settings() -> Iterator[EmittedSetting]:
    yield EmittedSetting("--hf-model", "$HF_MODEL")
    yield EmittedSetting("--dataset-name", "$DATASET_NAME")
    yield EmittedSetting("--pretrained-checkpoint", "$PRETRAINED_CHECKPOINT")
    yield EmittedSetting("--checkpoint-dir", "$CHECKPOINT_DIR")


def _variables(job: PlannedJob) -> Iterator[ShellVariable]:
    yield ShellVariable("HF_MODEL", job.weights, "a model of the Qwen3.5-VL family with the sizes of the recipe")
    yield ShellVariable("DATASET_NAME", None, "a data set that Megatron-Bridge knows, such as cord_v2")
    yield ShellVariable("PRETRAINED_CHECKPOINT", None, "folder of converted weights")
    yield ShellVariable("CHECKPOINT_DIR", f"checkpoints/{job.recipe.name}", "where checkpoints are written")


def _write(job: PlannedJob, accepted: AcceptedSettings, header: tuple[str, ...]) -> str:
    groups = (
        SettingGroup("Layout", "plan", tuple(_parallel_settings(job))),
        SettingGroup("Training", "recipe", tuple(_training_settings(job))),
        SettingGroup("Own", "yours", tuple(_own_settings())),
    )
    return shell_text(job, accepted, header, ShellScript(SCRIPT, groups, tuple(_variables(job))))


MIMO = OtherTrainer("MegatronMIMO of Megatron-Bridge", _problems, _fitting_options, _inexpressible, _write)
