"""Plans as a shell script that starts a recipe of Megatron-Bridge with other values."""

from collections.abc import Iterator

from mmtrain.planning.emit.accepted_settings import AcceptedSettings
from mmtrain.planning.emit.common_inexpressible import (
    MEGATRON_SCHEDULES,
    router_inexpressible,
    schedule_inexpressible,
)
from mmtrain.planning.emit.emitted_plan import EmittedSetting, Inexpressible, OtherTrainer, PlannedJob, SettingGroup
from mmtrain.planning.emit.megatron_layout import (
    VISION,
    core_inexpressible,
    core_options,
    core_problems,
    core_recompute,
    even_options,
    first_rank_problems,
    is_even,
    layout_text,
    megatron_schedule,
    mixer_problems,
)
from mmtrain.planning.emit.shell_script import ShellScript, ShellVariable, shell_text

SCRIPT = "scripts/training/run_recipe.py"


def _problems(job: PlannedJob) -> Iterator[str]:
    encoders = job.recipe.model.all_encoders
    if job.plan.placement != "unified":
        other = "; `--emit mimo` gives units ranks of their own" if job.plan.placement == "disaggregated" else ""
        yield f"the placement is {job.plan.placement}; its recipes run one pipeline (unified){other}"
        return
    if job.recipe.model.generator is not None:
        yield "the model has an image generator"
    yield from core_problems(job)
    yield from mixer_problems(job)
    if list(encoders) not in ([], [VISION]):
        yield f"the model has the encoders {', '.join(encoders)}; only one for images can be placed"
    elif encoders:
        yield from first_rank_problems(job)
        if (job.plan.units[VISION].tp, job.llm.tp) != (1, 1):
            yield (
                f"the LLM has tp {job.llm.tp} and vision {job.plan.units[VISION].tp}; every rank of a TP group encodes "
                "all its images there, which is no division of work"
            )


def _fitting_options(job: PlannedJob) -> tuple[str, ...]:
    return even_options(job, tp=1) if VISION in job.plan.units else core_options(job)


def _inexpressible(job: PlannedJob) -> Iterator[Inexpressible]:
    yield from core_inexpressible(job)
    yield from schedule_inexpressible(job, MEGATRON_SCHEDULES)
    yield from router_inexpressible(job)
    lora = job.recipe.train.lora
    if lora is not None:
        yield Inexpressible(
            f"adapters are on {', '.join(lora.targets)}", "they are on the linears that the recipe there names", True
        )
    if VISION in job.plan.units and job.plan.units[VISION].num_recomputed:
        yield Inexpressible(
            f"{job.plan.units[VISION].num_recomputed} vision layers are recomputed",
            "their activations are kept, which takes more memory",
        )


def _parallel_settings(job: PlannedJob) -> Iterator[EmittedSetting]:
    llm, blocks = job.llm, job.recipe.model.llm.layers
    yield EmittedSetting("model.tensor_model_parallel_size", llm.tp)
    yield EmittedSetting("model.pipeline_model_parallel_size", llm.pp)
    yield EmittedSetting("model.virtual_pipeline_model_parallel_size", llm.vpp if llm.vpp > 1 else None)
    layout = None if is_even(llm, blocks) else layout_text(llm, blocks)
    yield EmittedSetting("model.pipeline_model_parallel_layout", layout)
    yield EmittedSetting("model.sequence_parallel", llm.sp)
    yield EmittedSetting("model.context_parallel_size", llm.cp)
    if llm.cp > 1:
        yield EmittedSetting("model.cp_comm_type", "a2a" if llm.cp_method == "ulysses" else "p2p")
    if job.is_moe:
        yield EmittedSetting("model.expert_model_parallel_size", llm.ep)
        yield EmittedSetting("model.expert_tensor_parallel_size", llm.tp)
    if llm.sp and llm.tp_chunks > 1:
        yield EmittedSetting("model.tp_comm_overlap", True)
    yield from _recompute_settings(job)
    yield EmittedSetting("train.micro_batch_size", 1, "one group of packed samples")
    yield EmittedSetting("train.global_batch_size", job.plan.num_groups, "groups")
    yield EmittedSetting("ddp.use_distributed_optimizer", True)
    yield EmittedSetting("optimizer.use_distributed_optimizer", True)
    yield EmittedSetting("ddp.overlap_grad_reduce", True)
    yield EmittedSetting("ddp.overlap_param_gather", True)
    if llm.bucket_parameters is not None:
        yield EmittedSetting("ddp.bucket_size", llm.bucket_parameters)


def _recompute_settings(job: PlannedJob) -> Iterator[EmittedSetting]:
    recompute = core_recompute(job)
    yield EmittedSetting("model.recompute_granularity", recompute.granularity)
    if recompute.method is not None:
        yield EmittedSetting("model.recompute_method", recompute.method)
        yield EmittedSetting("model.recompute_num_layers", recompute.num_layers)
    if recompute.modules:
        yield EmittedSetting("model.recompute_modules", list(recompute.modules))


def _training_settings(job: PlannedJob) -> Iterator[EmittedSetting]:
    train, optimizer = job.recipe.train, job.recipe.train.optimizer
    yield EmittedSetting("train.train_iters", train.num_steps)
    yield EmittedSetting("optimizer.lr", optimizer.lr)
    yield EmittedSetting("optimizer.min_lr", optimizer.min_lr)
    yield EmittedSetting("optimizer.adam_beta1", optimizer.betas[0])
    yield EmittedSetting("optimizer.adam_beta2", optimizer.betas[1])
    yield EmittedSetting("optimizer.adam_eps", optimizer.eps)
    yield EmittedSetting("optimizer.weight_decay", optimizer.weight_decay)
    yield EmittedSetting("optimizer.clip_grad", optimizer.clip_norm or 0.0)
    yield from (EmittedSetting(f"scheduler.{name}", value) for name, value in megatron_schedule(job))
    yield EmittedSetting("ddp.grad_reduce_in_fp32", train.grad_reduce == "fp32")
    yield EmittedSetting("checkpoint.save_interval", train.checkpoint.every or train.num_steps)
    yield EmittedSetting("rng.seed", train.seed)
    if VISION in job.plan.units:
        vision = job.recipe.model.all_encoders[VISION]
        yield EmittedSetting("model.freeze_language_model", job.recipe.model.llm.freeze)
        yield EmittedSetting("model.freeze_vision_model", vision.freeze)
        yield EmittedSetting("model.freeze_vision_projection", vision.projector.freeze)
    if train.lora is not None:
        yield EmittedSetting("peft.dim", train.lora.rank)
        yield EmittedSetting("peft.alpha", round(train.lora.scale * train.lora.rank))  # scaled by alpha / rank there
    if optimizer.moments == "bf16":
        yield EmittedSetting("optimizer.use_precision_aware_optimizer", True)
        yield EmittedSetting("optimizer.exp_avg_dtype", "bf16")
        yield EmittedSetting("optimizer.exp_avg_sq_dtype", "bf16")


def _own_settings() -> Iterator[EmittedSetting]:
    yield EmittedSetting("checkpoint.pretrained_checkpoint", "$PRETRAINED_CHECKPOINT")
    yield EmittedSetting("checkpoint.save", "$CHECKPOINT_DIR")


def _variables(job: PlannedJob) -> Iterator[ShellVariable]:
    settings = job.recipe.model.llm
    sizes = f"{settings.layers} blocks of {settings.hidden}"
    yield ShellVariable("RECIPE", None, f"recipe function of a model with {sizes}, from src/megatron/bridge/recipes")
    yield ShellVariable("DATASET", None, "name that run_recipe.py --help lists")
    yield ShellVariable("PRETRAINED_CHECKPOINT", None, "folder of converted weights, from examples/conversion")
    yield ShellVariable("CHECKPOINT_DIR", f"checkpoints/{job.recipe.name}", "where checkpoints are written")


def _write(job: PlannedJob, accepted: AcceptedSettings, header: tuple[str, ...]) -> str:
    mode = "sft" if job.recipe.train.lora is None else "lora"
    started = (
        EmittedSetting("--recipe", "$RECIPE"),
        EmittedSetting("--mode", mode),
        EmittedSetting("--dataset", "$DATASET"),
        EmittedSetting("--seq_length", job.seq_len),
    )
    groups = (
        SettingGroup("Started", "yours", started),
        SettingGroup("Layout", "plan", tuple(_parallel_settings(job))),
        SettingGroup("Training", "recipe", tuple(_training_settings(job))),
        SettingGroup("Own", "yours", tuple(_own_settings())),
    )
    return shell_text(job, accepted, header, ShellScript(SCRIPT, groups, tuple(_variables(job))))


MEGATRON_BRIDGE = OtherTrainer("Megatron-Bridge", _problems, _fitting_options, _inexpressible, _write)
