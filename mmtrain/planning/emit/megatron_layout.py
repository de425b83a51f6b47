"""A plan's pipeline and recomputation in the terms of Megatron-core, which three trainers share."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mmtrain.planning.artifact.plan import UnitPlan
from mmtrain.planning.emit.common_inexpressible import MEGATRON_COOLDOWNS, MEGATRON_SCHEDULES, data_inexpressible
from mmtrain.planning.emit.emitted_plan import Inexpressible, PlannedJob
from mmtrain.program.ir.graph import LLM

VISION = "vision"  # the unit of the one encoder that LLaVA models have
EMBEDDING, BLOCK, HEAD = "E", "t", "L"  # in the text of Megatron-core's `pipeline_model_parallel_layout`


@dataclass(frozen=True)
class CoreRecompute:
    """What Megatron-core's `recompute_*` settings say.

    num_layers: of `block`, the first blocks of each model chunk; of `uniform` 1.
    is_exact: whether it recomputes as many blocks of each chunk as the plan.
    """

    granularity: Literal["full", "selective"] | None = None
    method: Literal["uniform", "block"] | None = None
    num_layers: int | None = None
    modules: tuple[str, ...] = ()
    is_exact: bool = True


def chunk_texts(llm: UnitPlan, num_blocks: int) -> tuple[str, ...]:
    """Return the layers of each model chunk along the data flow, such as `Et*12` and `t*12L`."""
    texts = []
    for stage in llm.stages:
        lo, hi = stage.layers
        blocks = min(hi, num_blocks + 1) - max(lo, 1)
        repeated = "" if blocks <= 0 else BLOCK if blocks == 1 else f"{BLOCK}*{blocks}"
        texts.append(EMBEDDING * (lo == 0) + repeated + HEAD * (hi == num_blocks + 2))
    return tuple(texts)


def num_blocks_of_chunks(llm: UnitPlan, num_blocks: int) -> tuple[int, ...]:
    """Return the number of blocks in each model chunk, without embedding and head."""
    return tuple(max(0, min(stage.layers[1], num_blocks + 1) - max(stage.layers[0], 1)) for stage in llm.stages)


def is_even(llm: UnitPlan, num_blocks: int) -> bool:
    """Return whether every model chunk has as many blocks, with the embedding in the first and the head in the last."""
    return len(set(num_blocks_of_chunks(llm, num_blocks))) == 1 and len(llm.stages) == llm.pp * llm.vpp


def layout_text(llm: UnitPlan, num_blocks: int) -> str:
    """Return the value of `pipeline_model_parallel_layout`."""
    return "|".join(chunk_texts(llm, num_blocks))


def core_recompute(job: PlannedJob) -> CoreRecompute:
    """Return the settings that recompute at least as many of the LLM's blocks in each chunk as the plan does."""
    num_blocks = job.recipe.model.llm.layers
    held = num_blocks_of_chunks(job.llm, num_blocks)
    counts = tuple(sum(1 <= layer <= num_blocks for layer in stage.recompute) for stage in job.llm.stages)
    if not any(counts):
        if not job.llm.recompute_activation_function:
            return CoreRecompute()
        modules = ("moe_act",) if job.is_moe else ("mlp",)
        return CoreRecompute("selective", modules=modules, is_exact=job.is_moe)
    if counts == held:
        return CoreRecompute("full", "uniform", 1)
    most = max(counts)
    is_exact = counts == tuple(min(most, number) for number in held)
    return CoreRecompute("full", "block", most, is_exact=is_exact)


def core_problems(job: PlannedJob) -> Iterator[str]:
    """Say what no Megatron-core pipeline of the LLM can be."""
    llm, recipe = job.llm, job.recipe
    num_chunks, count = llm.pp * llm.vpp, job.plan.schedule.num_microbatches[LLM]
    if len(llm.stages) != num_chunks:
        yield (
            f"the LLM has {len(llm.stages)} stages on {llm.pp} pipeline ranks x {llm.vpp} chunks, and Megatron-core "
            f"needs all {num_chunks}"
        )
    if llm.vpp > 1 and count % llm.pp:
        yield f"{count} microbatches are no multiple of {llm.pp} pipeline ranks, as chunks of Megatron-core need"
    if llm.offload != "none":
        yield "activations wait in host memory (offload)"
    settings = recipe.model.llm
    unknown = {
        "post_norms": settings.post_norms,
        "scale_embeddings": settings.scale_embeddings,
        f"image_attention: {settings.image_attention}": settings.image_attention != "causal",
        "mlp: geglu": settings.mlp == "geglu",
        "window_rope_base": settings.window_rope_base is not None,
        "full_attention": settings.full_attention is not None,
        "shared_kv": settings.shared_kv is not None,
        "per_layer_embeddings": settings.per_layer_embeddings is not None,
        "value_norm": settings.value_norm,
        "block_scales": settings.block_scales,
        "logit_cap": settings.logit_cap is not None,
    }
    names = [name for name, is_used in unknown.items() if is_used]
    if names:
        yield f"the LLM has {', '.join(names)}, which Megatron's GPT model has no setting for"
    if llm.cp > 1 and llm.cp_split != "even":
        yield f"context parallelism cuts the longest sequences alone (cp_split {llm.cp_split}); Megatron-core cuts all"


def mixer_problems(job: PlannedJob) -> Iterator[str]:
    """Say what has no arguments yet, for trainers that take no model from a folder."""
    settings = job.recipe.model.llm
    if settings.delta_net is not None or settings.attention_gate:
        yield "the LLM has delta_net or attention_gate, whose arguments of Megatron-core are not written yet"


def megatron_schedule(job: PlannedJob) -> Iterator[tuple[str, str | int]]:
    """Yield Megatron-core's names and values of the learning rate's schedule, one of `MEGATRON_SCHEDULES`."""
    num_steps, optimizer = job.recipe.train.num_steps, job.recipe.train.optimizer
    yield "lr_decay_style", MEGATRON_SCHEDULES[optimizer.schedule]
    if optimizer.schedule == "wsd":
        yield "lr_wsd_decay_style", MEGATRON_COOLDOWNS[optimizer.cooldown]
        yield "lr_wsd_decay_iters", optimizer.num_cooldown_steps(num_steps)
    yield "lr_decay_iters", num_steps
    yield "lr_warmup_iters", optimizer.num_warmup_steps(num_steps)


def first_rank_problems(job: PlannedJob) -> Iterator[str]:
    """Say what LLaVA models cannot do, whose encoder is whole on the first pipeline rank."""
    llm, vision = job.llm, job.plan.units[VISION]
    is_first = vision.pp == 1 and set(vision.ranks) == set(llm.ranks[: len(vision.ranks)])
    if not is_first or llm.stages[0].layers[0] != 0:
        yield (
            "vision layers lie on several pipeline ranks, or before the LLM's embedding; it has the encoder whole on "
            "the first pipeline rank"
        )
    if llm.vpp > 1:
        yield f"the pipeline has {llm.vpp} model chunks on a rank; with an encoder it has one"


def core_options(job: PlannedJob) -> tuple[str, ...]:
    """Return options of `mmtrain plan` with which plans of an LLM alone are free of `core_problems`."""
    options = ["--placement unified"]
    if job.llm.offload != "none":
        options.append("--set parallel.llm.offload=none")
    if job.llm.cp > 1:
        options.append("--set parallel.llm.cp_split=even")
    is_whole = len(job.llm.stages) == job.llm.pp * job.llm.vpp
    if job.llm.vpp > 1 and (job.plan.schedule.num_microbatches[LLM] % job.llm.pp or not is_whole):
        options.append("--set parallel.llm.vpp=1")
    return tuple(options)


def even_options(job: PlannedJob, tp: int) -> tuple[str, ...]:
    """Return options of a pipeline with evenly divided blocks, and the encoder on its first rank."""
    num_blocks = job.recipe.model.llm.layers
    pp = next(size for size in range(job.llm.pp, 0, -1) if num_blocks % size == 0)
    of_encoder = [job.recipe.model.all_encoders[VISION].layers, *[0] * (pp - 1)]
    return (
        "--placement unified",
        f"--set 'parallel.llm={{tp: {tp}, pp: {pp}, vpp: 1, layers_per_chunk: {[num_blocks // pp] * pp}}}'",
        f"--set 'parallel.vision={{tp: {tp}, vpp: 1, layers_per_chunk: {of_encoder}}}'",
    )


def core_inexpressible(job: PlannedJob) -> Iterator[Inexpressible]:
    """Say what of the LLM's part a trainer on Megatron-core leaves out."""
    recompute = core_recompute(job)
    if not recompute.is_exact and recompute.granularity == "full":
        yield Inexpressible(
            "stages recompute different numbers of blocks",
            f"every model chunk recomputes its first {recompute.num_layers}",
            lengthens=True,
        )
    if job.llm.recompute_activation_function and recompute.modules == ("mlp",):
        yield Inexpressible(
            "activation functions run again in backward", "whole MLPs run again, which frees more memory", True
        )
    if job.llm.recompute_activation_function and recompute.granularity == "full":
        yield Inexpressible(
            "activation functions run again in the blocks that are not recomputed",
            "their outputs are kept, which takes more memory",
        )
    if job.llm.tp_chunks > 1:
        yield Inexpressible(
            f"tensor-parallel linears run in {job.llm.tp_chunks} chunks of tokens",
            "`tp_comm_overlap` divides them by userbuffers, if sequence parallelism is on",
            lengthens=not job.llm.sp,
        )
    yield from data_inexpressible(job)
