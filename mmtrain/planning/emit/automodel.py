"""Plans as a configuration of NeMo Automodel, which shards whole models with FSDP2."""

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

UNKNOWN_MODEL = "/path/to/model"
UNKNOWN_DATA = "/path/to/train.jsonl"
PACKAGE = "nemo_automodel"
ALL_LLM_LINEARS = ("llm.*.linear_*",)  # the default of `train.lora.targets`


def _problems(job: PlannedJob) -> Iterator[str]:
    yield from sharded_problems(job)
    lora = job.recipe.train.lora
    if job.llm.shard == 1 and job.llm.num_replicas > 1 and (job.llm.tp, job.llm.cp, job.llm.ep) != (1, 1, 1):
        yield "copies of the model are whole (shard 1) beside tensor, context or expert parallelism; its DDP has none"
    if job.llm.cp > 1 and job.llm.cp_method != "ring":
        yield f"ranks share sequences by {job.llm.cp_method}; its cp_size is a ring"
    if lora is not None and (lora.targets != ALL_LLM_LINEARS or lora.also_train):
        yield "adapters are on other linears than the LLM's, or further parameters train beside them"


def _fitting_options(job: PlannedJob) -> tuple[str, ...]:
    ring = ("--set parallel.llm.cp_method=ring",) if job.llm.cp > 1 and job.llm.cp_method != "ring" else ()
    has_others = (job.llm.tp, job.llm.cp, job.llm.ep) != (1, 1, 1)
    shard = ("--set parallel.shard=all",) if job.llm.shard == 1 and has_others else ()
    return (*sharded_options(job), *shard, *ring)


def _inexpressible(job: PlannedJob) -> Iterator[Inexpressible]:
    yield from schedule_inexpressible(job, PLAIN_SCHEDULES)
    for name, encoder in job.recipe.model.all_encoders.items():
        if encoder.projector.freeze != encoder.freeze:
            projector = "is frozen" if encoder.projector.freeze else "trains"
            yield Inexpressible(f"the projector of {name} {projector}", "it is treated as the encoder is", True)
    yield from sharded_inexpressible(job)


def _parallel_settings(job: PlannedJob) -> Iterator[EmittedSetting]:
    llm, sizes = job.llm, sharded_sizes(job.llm)
    is_whole = llm.shard == 1 and llm.num_replicas > 1
    yield EmittedSetting("distributed.strategy", "ddp" if is_whole else "fsdp2")
    yield EmittedSetting("distributed.dp_size", llm.dp)
    if is_whole and job.plan.precision == "bf16":
        yield EmittedSetting("distributed.autocast_dtype", "bfloat16")
    if not is_whole:
        yield EmittedSetting("distributed.dp_replicate_size", sizes.copies, "copies of the model")
        yield EmittedSetting("distributed.tp_size", llm.tp)
        yield EmittedSetting("distributed.cp_size", llm.cp)
        yield EmittedSetting("distributed.ep_size", llm.ep)
        yield EmittedSetting("distributed.sequence_parallel", llm.sp)
        yield EmittedSetting("distributed.reshard_after_forward", not llm.keeps_weights)
    yield EmittedSetting("distributed.activation_checkpointing", recomputes_all(job))
    yield EmittedSetting("step_scheduler.global_batch_size", job.plan.num_groups, "groups of packed samples")
    yield EmittedSetting("step_scheduler.local_batch_size", 1)
    size = "pack_size" if job.encoders else "packed_sequence_size"
    yield EmittedSetting(f"packed_sequence.{size}", job.seq_len)


def _training_settings(job: PlannedJob) -> Iterator[EmittedSetting]:
    train, optimizer = job.recipe.train, job.recipe.train.optimizer
    yield EmittedSetting("step_scheduler.max_steps", train.num_steps)
    yield EmittedSetting("step_scheduler.ckpt_every_steps", train.checkpoint.every or train.num_steps)
    yield EmittedSetting("optimizer._target_", "torch.optim.AdamW")
    yield EmittedSetting("optimizer.lr", optimizer.lr)
    yield EmittedSetting("optimizer.betas", list(optimizer.betas))
    yield EmittedSetting("optimizer.eps", optimizer.eps)
    yield EmittedSetting("optimizer.weight_decay", optimizer.weight_decay)
    yield EmittedSetting("lr_scheduler.lr_decay_style", plain_schedule(job))
    yield EmittedSetting("lr_scheduler.lr_warmup_steps", optimizer.num_warmup_steps(train.num_steps))
    yield EmittedSetting("lr_scheduler.lr_decay_steps", train.num_steps)
    yield EmittedSetting("lr_scheduler.min_lr", optimizer.min_lr)
    if optimizer.clip_norm is not None:
        yield EmittedSetting("clip_grad_norm.max_norm", optimizer.clip_norm)
    yield EmittedSetting("rng._target_", f"{PACKAGE}.components.training.rng.StatefulRNG")
    yield EmittedSetting("rng.seed", train.seed)
    yield EmittedSetting("rng.ranked", True)
    encoders = job.recipe.model.all_encoders
    if encoders:
        yield EmittedSetting("freeze_config.freeze_language_model", job.recipe.model.llm.freeze)
        yield EmittedSetting("freeze_config.freeze_embeddings", job.recipe.model.llm.freeze)
        for modality, tower in (("vision", "freeze_vision_tower"), ("audio", "freeze_audio_tower")):
            frozen = [encoder.freeze for encoder in encoders.values() if encoder.modality == modality]
            yield EmittedSetting(f"freeze_config.{tower}", bool(frozen) and all(frozen))
    if train.lora is not None:
        yield EmittedSetting("peft._target_", f"{PACKAGE}.components._peft.lora.PeftConfig")
        yield EmittedSetting("peft.dim", train.lora.rank)
        yield EmittedSetting("peft.alpha", round(train.lora.scale * train.lora.rank))  # scaled by alpha / rank there
        yield EmittedSetting("peft.target_modules", "*_proj")
        yield EmittedSetting("peft.exclude_modules", ["*vision*", "*visual*", "*audio*"])


def _trainer_settings(job: PlannedJob) -> Iterator[EmittedSetting]:
    kind = "FinetuneRecipeForVLM" if job.encoders else "TrainFinetuneRecipeForNextTokenPrediction"
    yield EmittedSetting("recipe", kind)
    yield EmittedSetting("dist_env.backend", "nccl")
    loader = "NeMoAutoModelForImageTextToText" if job.encoders else "NeMoAutoModelForCausalLM"
    yield EmittedSetting("model._target_", f"{PACKAGE}.{loader}.from_pretrained")
    yield EmittedSetting("model.torch_dtype", "float32", "of the weights that the optimizer changes")
    yield EmittedSetting("model.attn_implementation", "flash_attention_2", "samples of a pack do not see each other")
    yield EmittedSetting("checkpoint.enabled", True)
    yield EmittedSetting("checkpoint.model_save_format", "safetensors")
    yield EmittedSetting("loss_fn._target_", f"{PACKAGE}.components.loss.masked_ce.MaskedCrossEntropy")
    yield EmittedSetting("dataloader._target_", "torchdata.stateful_dataloader.StatefulDataLoader")
    if job.encoders:
        yield EmittedSetting("packed_sequence.pretokenize", True)
        yield EmittedSetting("packed_sequence.max_length", job.seq_len)


def _own_settings(job: PlannedJob) -> Iterator[EmittedSetting]:
    comment = "folder or name of the model, with the sizes of the recipe"
    weights = job.weights or UNKNOWN_MODEL
    yield EmittedSetting("model.pretrained_model_name_or_path", weights, comment)
    if job.encoders:
        yield EmittedSetting("processor._target_", "transformers.AutoProcessor.from_pretrained")
        yield EmittedSetting("processor.pretrained_model_name_or_path", weights)
        target = f"{PACKAGE}.components.datasets.vlm.datasets.make_medpix_dataset"
        yield EmittedSetting("dataset._target_", target, "or another function there that reads your data")
        yield EmittedSetting("dataset.path_or_dataset", UNKNOWN_DATA)
    else:
        target = f"{PACKAGE}.components.datasets.llm.chat_dataset.ChatDataset"
        yield EmittedSetting("dataset._target_", target, "or another class there that reads your data")
        yield EmittedSetting("dataset.path_or_dataset_id", UNKNOWN_DATA)
    yield EmittedSetting("checkpoint.checkpoint_dir", f"checkpoints/{job.recipe.name}")


def _write(job: PlannedJob, accepted: AcceptedSettings, header: tuple[str, ...]) -> str:
    groups = (
        SettingGroup("Conventions", "trainer", tuple(_trainer_settings(job))),
        SettingGroup("Layout", "plan", tuple(_parallel_settings(job))),
        SettingGroup("Training", "recipe", tuple(_training_settings(job))),
        SettingGroup("Own", "yours", tuple(_own_settings(job))),
    )
    nodes = "" if job.num_nodes == 1 else f" on each of {job.num_nodes} nodes, as torchrun is started there"
    start = f"Start: automodel FILE --nproc-per-node {job.ranks_per_node}{nodes}."
    return yaml_text(accepted, [*header, start, ""], groups)


AUTOMODEL = OtherTrainer("NeMo Automodel", _problems, _fitting_options, _inexpressible, _write)
