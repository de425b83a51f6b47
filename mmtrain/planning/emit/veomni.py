"""Plans as a configuration of VeOmni, which shards whole models with FSDP2 and shares sequences by Ulysses."""

from collections.abc import Iterator

from mmtrain.planning.emit.accepted_settings import AcceptedSettings
from mmtrain.planning.emit.common_inexpressible import PLAIN_SCHEDULES, plain_schedule, schedule_inexpressible
from mmtrain.planning.emit.emitted_plan import EmittedSetting, Inexpressible, OtherTrainer, PlannedJob, SettingGroup
from mmtrain.planning.emit.sharded_layout import (
    recomputes_all,
    sharded_inexpressible,
    sharded_options,
    sharded_problems,
    sharded_sizes,
)
from mmtrain.planning.emit.yaml_file import yaml_text
from mmtrain.program.ir.graph import LLM

UNKNOWN_MODEL = "/path/to/model"
UNKNOWN_DATA = "/path/to/data"
OWN_BETAS = (0.9, 0.95)  # of its optimizers, for which it has no setting
OWN_EPS = 1e-8


def _problems(job: PlannedJob) -> Iterator[str]:
    yield from sharded_problems(job)
    if job.llm.shard == 1:
        yield "every rank holds a whole copy of the model (shard 1)"
    if job.llm.tp > 1:
        yield f"tensor parallelism is {job.llm.tp}; it has none"
    if job.llm.cp > 1 and job.llm.cp_method != "ulysses":
        yield f"ranks share sequences by a {job.llm.cp_method}; it has Ulysses"
    if job.recipe.train.lora is not None:
        yield "adapters are trained (train.lora), which automodel has"
    if job.recipe.model.llm.freeze:
        yield "the LLM is frozen; it can freeze encoders only"


def _fitting_options(job: PlannedJob) -> tuple[str, ...]:
    ulysses = ("--set parallel.llm.cp_method=ulysses",) if job.llm.cp > 1 and job.llm.cp_method != "ulysses" else ()
    no_tp = ("--set parallel.llm.tp=1",) if any(unit.tp > 1 for unit in job.plan.units.values()) else ()
    shard = ("--set parallel.shard=all",) if job.llm.shard == 1 else ()
    return (*sharded_options(job), *shard, *no_tp, *ulysses)


def _inexpressible(job: PlannedJob) -> Iterator[Inexpressible]:
    yield from schedule_inexpressible(job, PLAIN_SCHEDULES)
    optimizer = job.recipe.train.optimizer
    if optimizer.betas != OWN_BETAS:
        yield Inexpressible(f"Adam's betas are {optimizer.betas}", f"they are {OWN_BETAS}")
    if optimizer.eps != OWN_EPS:
        yield Inexpressible(f"Adam's epsilon is {optimizer.eps:g}", f"it is {OWN_EPS:g}")
    for name, encoder in job.recipe.model.all_encoders.items():
        if encoder.projector.freeze != encoder.freeze:
            projector = "is frozen" if encoder.projector.freeze else "trains"
            yield Inexpressible(f"the projector of {name} {projector}", "it is treated as the encoder is", True)
    yield from sharded_inexpressible(job)


def _parallel_settings(job: PlannedJob) -> Iterator[EmittedSetting]:
    llm, sizes = job.llm, sharded_sizes(job.llm)
    yield EmittedSetting("train.accelerator.dp_replicate_size", sizes.copies)
    yield EmittedSetting("train.accelerator.dp_shard_size", sizes.shard)
    yield EmittedSetting("train.accelerator.ulysses_size", llm.cp)
    if job.is_moe:
        yield EmittedSetting("train.accelerator.ep_size", llm.ep)
    yield EmittedSetting("train.accelerator.fsdp_config.fsdp_mode", "fsdp2")
    yield EmittedSetting("train.accelerator.fsdp_config.reshard_after_forward", not llm.keeps_weights)
    is_bf16 = job.plan.precision == "bf16"
    yield EmittedSetting("train.accelerator.fsdp_config.mixed_precision.enable", is_bf16)
    yield EmittedSetting("train.accelerator.fsdp_config.mixed_precision.reduce_dtype", _reduce_type(job))
    yield EmittedSetting("train.gradient_checkpointing.enable", recomputes_all(job))
    yield EmittedSetting("train.micro_batch_size", 1, "one group of packed samples")
    yield EmittedSetting("train.global_batch_size", job.plan.num_groups, "groups")
    yield EmittedSetting("data.max_seq_len", job.seq_len)


def _reduce_type(job: PlannedJob) -> str:
    return "bfloat16" if job.recipe.train.grad_reduce == "bf16" else "float32"


def _training_settings(job: PlannedJob) -> Iterator[EmittedSetting]:
    train, optimizer = job.recipe.train, job.recipe.train.optimizer
    yield EmittedSetting("train.max_steps", train.num_steps)
    yield EmittedSetting("data.train_size", train.num_steps * job.plan.num_groups * job.seq_len, "tokens of all steps")
    yield EmittedSetting("train.optimizer.type", "adamw")
    yield EmittedSetting("train.optimizer.lr", optimizer.lr)
    yield EmittedSetting("train.optimizer.lr_min", optimizer.min_lr)
    yield EmittedSetting("train.optimizer.lr_decay_style", plain_schedule(job))
    yield EmittedSetting(
        "train.optimizer.lr_warmup_ratio", optimizer.num_warmup_steps(train.num_steps) / train.num_steps
    )
    yield EmittedSetting("train.optimizer.weight_decay", optimizer.weight_decay)
    yield EmittedSetting("train.optimizer.max_grad_norm", optimizer.clip_norm or float("inf"))
    yield EmittedSetting("train.seed", train.seed)
    yield EmittedSetting("train.checkpoint.save_steps", train.checkpoint.every)
    encoders = job.recipe.model.all_encoders.values()
    for modality, key in (("vision", "freeze_vit"), ("audio", "freeze_audio_tower")):
        frozen = [encoder.freeze for encoder in encoders if encoder.modality == modality]
        if frozen:
            yield EmittedSetting(f"train.{key}", all(frozen))
    if any(encoder.modality == "vision" for encoder in encoders):
        yield EmittedSetting("train.vit_lr", optimizer.lr)


def _trainer_settings(job: PlannedJob) -> Iterator[EmittedSetting]:
    yield EmittedSetting("train.init_device", "meta", "what fsdp2 needs")
    yield EmittedSetting("train.dyn_bsz", True, "samples are packed, and do not see each other")
    yield EmittedSetting("data.data_type", "conversation")
    yield EmittedSetting("model.ops_implementation.attn_implementation", "flash_attention_2")
    yield EmittedSetting("train.wandb.enable", False)


def _own_settings(job: PlannedJob) -> Iterator[EmittedSetting]:
    comment = "folder or name of the model, with the sizes of the recipe"
    yield EmittedSetting("model.model_path", job.weights or UNKNOWN_MODEL, comment)
    yield EmittedSetting("data.train_path", UNKNOWN_DATA)
    yield EmittedSetting("data.chat_template", "default", "the template of your model")
    yield EmittedSetting("train.checkpoint.output_dir", f"checkpoints/{job.recipe.name}")


def _write(job: PlannedJob, accepted: AcceptedSettings, header: tuple[str, ...]) -> str:
    groups = (
        SettingGroup("Own", "yours", tuple(_own_settings(job))),
        SettingGroup("Layout", "plan", tuple(_parallel_settings(job))),
        SettingGroup("Training", "recipe", tuple(_training_settings(job))),
        SettingGroup("Conventions", "trainer", tuple(_trainer_settings(job))),
    )
    program = "tasks/train_vlm.py" if set(job.plan.units) - {LLM} else "tasks/train_text.py"
    size = f"NNODES={job.num_nodes} NPROC_PER_NODE={job.ranks_per_node}"
    own = " NODE_RANK=I MASTER_ADDR=HOST" if job.num_nodes > 1 else ""
    return yaml_text(accepted, [*header, f"Start: {size}{own} bash train.sh {program} FILE", ""], groups)


VEOMNI = OtherTrainer("VeOmni", _problems, _fitting_options, _inexpressible, _write)
