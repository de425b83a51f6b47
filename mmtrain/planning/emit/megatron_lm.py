"""Plans as a shell script that starts Megatron-LM with its arguments."""

from collections.abc import Iterator

from mmtrain.planning.emit.accepted_settings import AcceptedSettings
from mmtrain.planning.emit.common_inexpressible import MEGATRON_SCHEDULES, schedule_inexpressible
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
from mmtrain.recipe.settings.llm_settings import EXPERTS_THAT_SCORE_A_GROUP, LlmSettings, MoeSettings

TEXT_SCRIPT, VISION_SCRIPT = "pretrain_gpt.py", "examples/multimodal/train.py"
PACKING_BUFFER_SAMPLES = 64
FIRST_SEED = 1  # Megatron-LM rejects 0
LLAMA3_POSITIONS = 8192  # that its `--use-rope-scaling` assumes the model was pretrained with


def _problems(job: PlannedJob) -> Iterator[str]:
    encoders = job.recipe.model.all_encoders
    if job.plan.placement != "unified":
        yield f"the placement is {job.plan.placement}; it runs one pipeline (unified)"
        return
    if job.recipe.model.generator is not None:
        yield "the model has an image generator"
    yield from _llm_problems(job.recipe.model.llm)
    if job.recipe.train.lora is not None:
        yield "adapters are trained (train.lora), which megatron-bridge and automodel have"
    yield from core_problems(job)
    yield from mixer_problems(job)
    if list(encoders) not in ([], [VISION]):
        yield f"the model has the encoders {', '.join(encoders)}; its LLaVA has one, for images"
    elif encoders:
        yield from first_rank_problems(job)
        if job.plan.units[VISION].tp != job.llm.tp:
            yield f"vision has tp {job.plan.units[VISION].tp} and the LLM {job.llm.tp}; its LLaVA gives both the same"
        if not is_even(job.llm, job.recipe.model.llm.layers):
            yield "the LLM's blocks are divided unevenly; the encoder of its LLaVA would take over that division"


def _llm_problems(settings: LlmSettings) -> Iterator[str]:
    """Say what of the LLM its arguments cannot describe."""
    scaling = settings.rope_scaling
    if settings.rope_sections is not None:
        yield "the LLM has positions by time, row and column (rope_sections), which megatron-bridge has"
    if scaling is not None and (scaling.kind, scaling.original_positions) != ("llama3", LLAMA3_POSITIONS):
        yield f"rotary positions are scaled by `{scaling.kind}`; it has the scaling of Llama 3.1, of 8192 positions"
    if settings.query_scale not in (None, settings.head_dim or settings.hidden // settings.heads):
        yield "scores of attention have a scale of their own (query_scale)"
    if settings.query_growth is not None:
        yield "queries grow with their positions (query_growth)"
    yield from _moe_problems(settings.moe)


def _moe_problems(moe: MoeSettings | None) -> Iterator[str]:
    if moe is None:
        return
    if not moe.normalize:
        yield "weights of a token's experts are not normalized (moe.normalize: false)"
    if moe.selection_bias and moe.scores == "softmax":
        yield "a bias selects experts by softmax scores (moe.selection_bias); it has biases for sigmoid scores"
    scoring = moe.top_k // moe.top_groups  # experts by which it scores a group
    if moe.groups > 1 and scoring != EXPERTS_THAT_SCORE_A_GROUP:
        yield f"a group scores as much as its best {EXPERTS_THAT_SCORE_A_GROUP} experts; there it is its best {scoring}"


def _fitting_options(job: PlannedJob) -> tuple[str, ...]:
    if VISION not in job.plan.units:
        return core_options(job)
    heads = job.recipe.model.all_encoders[VISION].heads
    return even_options(job, job.llm.tp if heads % job.llm.tp == 0 else 1)


def _inexpressible(job: PlannedJob) -> Iterator[Inexpressible]:
    yield from core_inexpressible(job)
    yield from schedule_inexpressible(job, MEGATRON_SCHEDULES)
    moe = job.recipe.model.llm.moe
    if moe is not None and moe.balance_loss:
        yield Inexpressible("loads of experts count in each sample", "they count in each packed group")
    if VISION not in job.plan.units:
        return
    vision = job.plan.units[VISION]
    num_layers = vision.stages[-1].layers[1]
    if 0 < vision.num_recomputed < num_layers - 2:
        yield Inexpressible(
            f"{vision.num_recomputed} of {num_layers} vision layers are recomputed", "all are", lengthens=True
        )
    if job.recipe.model.all_encoders[VISION].projector.freeze:
        yield Inexpressible("the projector is frozen", "it trains")
    yield Inexpressible(
        "images are cut and resized as the recipe says", "`examples/multimodal` cuts tiles of img-h x img-w"
    )


def _parallel_settings(job: PlannedJob) -> Iterator[EmittedSetting]:
    llm, blocks = job.llm, job.recipe.model.llm.layers
    yield EmittedSetting("--tensor-model-parallel-size", llm.tp)
    yield EmittedSetting("--pipeline-model-parallel-size", llm.pp)
    if not is_even(llm, blocks):
        yield EmittedSetting("--pipeline-model-parallel-layout", layout_text(llm, blocks))
    elif llm.vpp > 1:
        yield EmittedSetting("--num-virtual-stages-per-pipeline-rank", llm.vpp)
    if llm.sp:
        yield EmittedSetting("--sequence-parallel", True)
    if llm.sp and llm.tp_chunks > 1:
        yield EmittedSetting("--tp-comm-overlap", True)
    yield EmittedSetting("--context-parallel-size", llm.cp)
    if llm.cp > 1:
        yield EmittedSetting("--cp-comm-type", "a2a" if llm.cp_method == "ulysses" else "p2p")
    if job.is_moe:
        yield EmittedSetting("--expert-model-parallel-size", llm.ep)
        yield EmittedSetting("--expert-tensor-parallel-size", llm.tp)
    yield EmittedSetting("--micro-batch-size", 1, "one group of packed samples")
    yield EmittedSetting("--global-batch-size", job.plan.num_groups, "groups")
    yield EmittedSetting("--seq-length", job.seq_len)
    yield from _recompute_settings(job)
    yield EmittedSetting("--use-distributed-optimizer", True)
    yield EmittedSetting("--overlap-grad-reduce", True)
    yield EmittedSetting("--overlap-param-gather", True)
    if llm.bucket_parameters is not None:
        yield EmittedSetting("--ddp-bucket-size", llm.bucket_parameters)
    if job.plan.precision == "bf16":
        yield EmittedSetting("--bf16", True)


def _recompute_settings(job: PlannedJob) -> Iterator[EmittedSetting]:
    recompute = core_recompute(job)
    if recompute.granularity is not None:
        yield EmittedSetting("--recompute-granularity", recompute.granularity)
    if recompute.method is not None:
        yield EmittedSetting("--recompute-method", recompute.method)
        yield EmittedSetting("--recompute-num-layers", recompute.num_layers)
    if recompute.modules:
        yield EmittedSetting("--recompute-modules", list(recompute.modules))
    if VISION in job.plan.units and job.plan.units[VISION].num_recomputed:
        yield EmittedSetting("--recompute-vision", True)


def _model_settings(job: PlannedJob) -> Iterator[EmittedSetting]:
    settings = job.recipe.model.llm
    yield EmittedSetting("--num-layers", settings.layers)
    yield EmittedSetting("--hidden-size", settings.hidden)
    yield EmittedSetting("--ffn-hidden-size", settings.ffn)
    yield EmittedSetting("--num-attention-heads", settings.heads)
    if settings.kv_heads not in (None, settings.heads):
        yield EmittedSetting("--group-query-attention", True)
        yield EmittedSetting("--num-query-groups", settings.kv_heads)
    yield EmittedSetting("--kv-channels", settings.head_dim or settings.hidden // settings.heads)
    yield EmittedSetting("--max-position-embeddings", job.seq_len)
    yield EmittedSetting("--position-embedding-type", "rope")
    yield EmittedSetting("--rotary-base", round(settings.rope_base))
    if settings.rope_width is not None:
        head_dim = settings.head_dim or settings.hidden // settings.heads
        yield EmittedSetting("--rotary-percent", settings.rope_width / head_dim)
    if settings.rope_scaling is not None:
        yield EmittedSetting("--use-rope-scaling", True)
        yield EmittedSetting("--rope-scaling-factor", settings.rope_scaling.factor)
    if settings.window is not None:
        yield EmittedSetting("--window-size", f"({settings.window - 1},0)", "tokens to the left and right")
    if settings.full_attention_blocks:
        is_window = [int(block not in settings.full_attention_blocks) for block in range(settings.layers)]
        yield EmittedSetting("--window-attn-skip-freq", str(is_window).replace(" ", ""))
    yield EmittedSetting("--normalization", "RMSNorm")
    yield EmittedSetting("--norm-epsilon", settings.norm_eps)
    if settings.zero_centered_norms:
        yield EmittedSetting("--apply-layernorm-1p", True)
    if settings.mlp == "swiglu":
        yield EmittedSetting("--swiglu", True)
    yield EmittedSetting("--disable-bias-linear", True)
    if settings.qkv_bias:
        yield EmittedSetting("--add-qkv-bias", True)
    if settings.qk_norm:
        yield EmittedSetting("--qk-layernorm", True)
    if not settings.tie_embeddings:
        yield EmittedSetting("--untie-embeddings-and-output-weights", True)
    yield EmittedSetting("--vocab-size", settings.vocab)
    yield from _moe_settings(settings)


def _moe_settings(settings: LlmSettings) -> Iterator[EmittedSetting]:
    moe = settings.moe
    if moe is None:
        return
    yield EmittedSetting("--num-experts", moe.experts)
    yield EmittedSetting("--moe-router-topk", moe.top_k)
    yield EmittedSetting("--moe-ffn-hidden-size", moe.ffn)
    if moe.dense_blocks:
        has_experts = [int(block not in moe.dense_blocks) for block in range(settings.layers)]
        yield EmittedSetting("--moe-layer-freq", str(has_experts).replace(" ", ""))
    yield EmittedSetting("--moe-grouped-gemm", True)
    yield EmittedSetting("--moe-token-dispatcher-type", "alltoall")
    yield from _router_settings(moe)
    if moe.shared_ffn is not None:
        yield EmittedSetting("--moe-shared-expert-intermediate-size", moe.shared_ffn)
    if moe.shared_gate:
        yield EmittedSetting("--moe-shared-expert-gate", True)


def _router_settings(moe: MoeSettings) -> Iterator[EmittedSetting]:
    yield EmittedSetting("--moe-router-score-function", moe.scores)
    if moe.scores == "sigmoid":
        yield EmittedSetting("--moe-router-dtype", "fp32")
    if moe.selection_bias:
        yield EmittedSetting("--moe-router-enable-expert-bias", True)
        yield EmittedSetting("--moe-router-bias-update-rate", moe.selection_bias_rate)
    if moe.groups > 1:
        yield EmittedSetting("--moe-router-num-groups", moe.groups)
        yield EmittedSetting("--moe-router-group-topk", moe.top_groups)
    if moe.weight_scale != 1.0:
        yield EmittedSetting("--moe-router-topk-scaling-factor", moe.weight_scale)
    yield EmittedSetting("--moe-router-load-balancing-type", "seq_aux_loss" if moe.balance_loss else "none")
    if moe.balance_loss:
        yield EmittedSetting("--moe-aux-loss-coeff", moe.balance_loss)
    if moe.z_loss:
        yield EmittedSetting("--moe-z-loss-coeff", moe.z_loss)


def _training_settings(job: PlannedJob) -> Iterator[EmittedSetting]:
    train = job.recipe.train
    optimizer = train.optimizer
    yield EmittedSetting("--train-iters", train.num_steps)
    yield EmittedSetting("--lr", optimizer.lr)
    yield EmittedSetting("--min-lr", optimizer.min_lr)
    yield from (EmittedSetting(f"--{name.replace('_', '-')}", value) for name, value in megatron_schedule(job))
    yield EmittedSetting("--adam-beta1", optimizer.betas[0])
    yield EmittedSetting("--adam-beta2", optimizer.betas[1])
    yield EmittedSetting("--adam-eps", optimizer.eps)
    yield EmittedSetting("--weight-decay", optimizer.weight_decay)
    yield EmittedSetting("--clip-grad", optimizer.clip_norm or 0.0)
    if optimizer.moments == "bf16":
        yield EmittedSetting("--use-precision-aware-optimizer", True)
        yield EmittedSetting("--exp-avg-dtype", "bf16")
        yield EmittedSetting("--exp-avg-sq-dtype", "bf16")
    if train.grad_reduce == "bf16":
        yield EmittedSetting("--grad-reduce-in-bf16", True)
        yield EmittedSetting("--ddp-reduce-scatter-with-fp32-accumulation", True)
    yield EmittedSetting("--save-interval", train.checkpoint.every or train.num_steps)
    yield EmittedSetting("--seed", max(FIRST_SEED, train.seed), "it takes no 0" if train.seed == 0 else "")
    if VISION in job.plan.units and job.recipe.model.all_encoders[VISION].freeze:
        yield EmittedSetting("--freeze-ViT", True)
    if VISION in job.plan.units and job.recipe.model.llm.freeze:
        yield EmittedSetting("--freeze-LM", True)


def _trainer_settings(job: PlannedJob) -> Iterator[EmittedSetting]:
    yield EmittedSetting("--attention-dropout", 0.0)
    yield EmittedSetting("--hidden-dropout", 0.0)
    yield EmittedSetting("--log-interval", 1)
    yield EmittedSetting("--eval-iters", 0)
    if VISION not in job.plan.units:
        yield EmittedSetting("--tokenizer-type", "HuggingFaceTokenizer")
        yield EmittedSetting("--dataloader-inter-document-masking", True, "samples of a group do not see each other")
        yield EmittedSetting("--no-create-attention-mask-in-dataloader", True)
        yield EmittedSetting("--ckpt-format", "torch_dist")
        return
    yield EmittedSetting("--tokenizer-type", "MultimodalTokenizer")
    yield EmittedSetting("--dataloader-type", "external")
    yield EmittedSetting("--packing-buffer-size", PACKING_BUFFER_SAMPLES, "samples that wait to be packed")
    yield EmittedSetting("--packing-seq-length", job.seq_len)
    yield EmittedSetting("--use-te", True)
    yield EmittedSetting("--disable-vision-class-token", True)
    yield EmittedSetting("--ckpt-format", "torch")


def _own_settings(job: PlannedJob) -> Iterator[EmittedSetting]:
    yield EmittedSetting("--data-path", "$DATA_PATH")
    yield EmittedSetting("--split", "100,0,0")
    yield EmittedSetting("--tokenizer-model", "$TOKENIZER_MODEL")
    yield EmittedSetting("--save", "$CHECKPOINT_DIR")
    yield EmittedSetting("--load", "$CHECKPOINT_DIR", "weights to start from, or what an earlier run saved")
    if VISION in job.plan.units:
        yield EmittedSetting("--language-model-type", "$LANGUAGE_MODEL_TYPE")
        yield EmittedSetting("--tokenizer-prompt-format", "$PROMPT_FORMAT")
        yield EmittedSetting("--prompt-path", "$PROMPT_PATH")
        yield EmittedSetting("--img-h", "$IMAGE_SIDE")
        yield EmittedSetting("--img-w", "$IMAGE_SIDE")


def _variables(job: PlannedJob, accepted: AcceptedSettings) -> Iterator[ShellVariable]:
    is_text = VISION not in job.plan.units
    data = "prefix of data that tools/preprocess_data.py wrote" if is_text else "YAML file of an Energon data set"
    yield ShellVariable("DATA_PATH", None, data)
    yield ShellVariable("TOKENIZER_MODEL", job.weights, "folder or name of the tokenizer")
    yield ShellVariable("CHECKPOINT_DIR", f"checkpoints/{job.recipe.name}", "where checkpoints lie")
    if is_text:
        return
    settings = job.recipe.model.llm
    sizes = f"{settings.layers} blocks, ffn {settings.ffn}"
    yield ShellVariable("LANGUAGE_MODEL_TYPE", None, f"name in examples/multimodal/config.py of an LLM with {sizes}")
    if _encoder_type(job, accepted) is None:
        vision = job.recipe.model.all_encoders[VISION]
        own = f"name in examples/multimodal/config.py of an encoder with {vision.layers} layers of {vision.hidden}"
        yield ShellVariable("VISION_MODEL_TYPE", None, f"{own}; it has none yet")
    yield ShellVariable("PROMPT_FORMAT", None, "a format of examples/multimodal/multimodal_args.py")
    yield ShellVariable("PROMPT_PATH", "examples/multimodal/manual_prompts.json", "JSON file of prompts")
    yield ShellVariable("IMAGE_SIDE", _image_side(job), "side of a tile in pixels")


def _image_side(job: PlannedJob) -> str | None:
    vision = job.recipe.model.vision
    if vision is None or vision.positions != "grid" or vision.max_side is None:
        return None
    return str(vision.max_side * vision.patch)


def _encoder_type(job: PlannedJob, accepted: AcceptedSettings) -> str | None:
    """Return the name that its examples have for an encoder of these sizes; None if they have none."""
    vision = job.recipe.model.all_encoders[VISION]
    sizes = {"num_layers": vision.layers, "hidden_size": vision.hidden, "ffn_hidden_size": vision.ffn}
    matching = [name for name, of_encoder in accepted.encoders.items() if sizes.items() <= of_encoder.items()]
    return matching[0] if matching else None


def _encoder_settings(job: PlannedJob, accepted: AcceptedSettings) -> Iterator[EmittedSetting]:
    vision = job.recipe.model.vision
    assert vision is not None
    yield EmittedSetting("--vision-model-type", _encoder_type(job, accepted) or "$VISION_MODEL_TYPE")
    yield EmittedSetting("--patch-dim", vision.patch)
    if vision.downsample == "pixel_shuffle":
        yield EmittedSetting("--pixel-shuffle", True)
    yield EmittedSetting("--decoder-seq-length", job.seq_len)


def _write(job: PlannedJob, accepted: AcceptedSettings, header: tuple[str, ...]) -> str:
    has_vision = VISION in job.plan.units
    encoder = tuple(_encoder_settings(job, accepted)) if has_vision else ()
    groups = (
        SettingGroup("Layout", "plan", tuple(_parallel_settings(job))),
        SettingGroup("Model", "recipe", (*_model_settings(job), *encoder)),
        SettingGroup("Training", "recipe", tuple(_training_settings(job))),
        SettingGroup("Conventions", "trainer", tuple(_trainer_settings(job))),
        SettingGroup("Own", "yours", tuple(_own_settings(job))),
    )
    program = VISION_SCRIPT if has_vision else TEXT_SCRIPT
    exports = ("CUDA_DEVICE_MAX_CONNECTIONS=1",)  # keeps the order of collectives and GEMMs, which it asks for
    return shell_text(job, accepted, header, ShellScript(program, groups, tuple(_variables(job, accepted)), exports))


MEGATRON_LM = OtherTrainer("Megatron-LM", _problems, _fitting_options, _inexpressible, _write)
