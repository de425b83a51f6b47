"""Settings of a recipe's `train`: steps, optimizer, checkpoints, evaluation, and what is trained."""

import math
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from mmtrain.recipe.settings.base import NOTHING, PositiveFloat, PositiveInt, Section, setting
from mmtrain.recipe.settings.metric_names import MetricNames, higher_is_better
from mmtrain.recipe.settings.source_path import SourcePath, require_object_store

DecayRate = Annotated[float, Field(ge=0, lt=1)]
BatchUnit = Literal["samples", "tokens"]
LearningRateShape = Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"]
CooldownShape = Literal["linear", "cosine", "sqrt"]
DEFAULT_WSD_COOLDOWN = 0.1  # of all steps: MiniCPM (arXiv 2404.06395) finds a tenth enough


def batch_size(value: object) -> object:
    """Return what `train.global_batch` may be: a number of groups, or of samples or tokens by name.

    The type's own messages would name alternatives that nobody wrote. Raises ValueError.
    """
    numbers = [value]
    if isinstance(value, dict):
        numbers = list(value.values()) if list(value) in (["samples"], ["tokens"]) else []
    if len(numbers) != 1 or type(numbers[0]) is not int or numbers[0] < 1:
        raise ValueError(
            f"found {value!r}; allowed: groups as a whole number, {{samples: N}} or {{tokens: N}}, each at least 1"
        )
    return value


BatchSize = Annotated[
    PositiveInt | dict[BatchUnit, PositiveInt],
    BeforeValidator(batch_size, json_schema_input_type=PositiveInt | dict[BatchUnit, PositiveInt]),
]


class OptimizerSettings(Section):
    """The optimizer and its learning-rate schedule."""

    kind: Literal["adamw", "muon"] = setting(
        "adamw",
        affects={"plan", "resume"},
        added_later=True,
        description="`muon` trains the linears of blocks and projectors by Muon, and all else by AdamW: embeddings, "
        "the head, norms, biases, routers, generators. Its updates are as large as AdamW's, so `lr` and `weight_decay` "
        "stay (arXiv 2502.16982). It keeps one moment of a weight, not two.",
    )
    lr: float = setting(gt=0, affects=NOTHING, description="Peak learning rate.")
    min_lr: float = setting(0.0, ge=0, affects=NOTHING, description="Learning rate at the end of the schedule.")
    schedule: LearningRateShape = setting(
        "cosine",
        affects=NOTHING,
        description="Shape of the learning rate after warm-up. `cosine`, `linear`: it falls to `min_lr` with the last "
        "step. `constant`. `wsd` (warm-up, stable, decay): constant, then a cool-down. `inverse_sqrt`: it falls with "
        "the square root of the steps, whatever their number is; the unit is the warm-up, or 10,000 steps.",
    )
    warmup_steps: int = setting(0, ge=0, affects=NOTHING, description="Steps of linear warm-up from 0.")
    warmup_ratio: float | None = setting(
        None,
        ge=0,
        lt=1,
        affects=NOTHING,
        added_later=True,
        description="Share of all steps that warm up, instead of `warmup_steps`; rounded up.",
    )
    cooldown_ratio: float | None = setting(
        None,
        ge=0,
        le=1,
        affects=NOTHING,
        added_later=True,
        description="Share of all steps, the last ones, in which the learning rate falls from where it is to `min_lr`; "
        "rounded up. For `wsd`, `constant` and `inverse_sqrt`, since the others fall anyway. Default: 0.1 for `wsd`, "
        "else none.",
    )
    cooldown: CooldownShape = setting(
        "linear",
        affects=NOTHING,
        added_later=True,
        description="Shape of the cool-down. `sqrt`: 1 minus the square root of its progress, which falls fast first.",
    )
    betas: tuple[DecayRate, DecayRate] = setting(
        (0.9, 0.95), affects=NOTHING, description="Decay rates of Adam's two moments, each in [0, 1)."
    )
    eps: float = setting(1e-8, gt=0, affects=NOTHING, description="Adam's epsilon.")
    muon_momentum: DecayRate = setting(
        0.95, affects=NOTHING, added_later=True, description="Decay rate of Muon's momentum, by Nesterov's rule."
    )
    weight_decay: float = setting(
        0.0, ge=0, affects=NOTHING, description="Decoupled weight decay of matrices; norms and biases do not decay."
    )
    layer_lr_decay: float = setting(
        1.0,
        gt=0,
        le=1,
        affects=NOTHING,
        added_later=True,
        description="Layer-wise decay of the learning rate in encoders and the LLM: each block learns with this times "
        "the rate of the block behind it. The last block and what follows it (head, projector) have the unit's full "
        "rate, with its `lr_scale`; the first layer (embedding) has the lowest. 1: all layers learn alike.",
    )
    moments: Literal["fp32", "bf16"] = setting(
        "fp32",
        affects={"plan"},
        description="Type of Adam's two moments. `bf16`, with stochastic rounding, takes 14 instead of 18 bytes per "
        "parameter of a bf16 model. A resumed run may change it: the moments are converted.",
    )
    clip_norm: float | None = setting(
        1.0, gt=0, affects=NOTHING, description="Clip the global gradient norm to this value. null: do not clip."
    )

    @model_validator(mode="after")
    def _check_moments(self) -> Self:
        problem = (
            "moments: found bf16 with kind muon, whose momentum is in fp32; allowed: fp32. It takes 14 bytes per "
            "parameter of a bf16 linear, as AdamW's moments in bf16 do"
        )
        return self._without([problem] if self.kind == "muon" and self.moments == "bf16" else [])

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        problems = []
        if self.warmup_ratio is not None and self.warmup_steps:
            problems.append(
                f"warmup_ratio: found {self.warmup_ratio:g} beside warmup_steps {self.warmup_steps}; allowed: one of "
                "both. Set the other to null or 0"
            )
        if self.cooldown_ratio is not None and self.schedule in ("cosine", "linear"):
            problems.append(
                f"cooldown_ratio: found {self.cooldown_ratio:g} with schedule {self.schedule}, which falls to min_lr "
                "anyway; allowed with wsd, constant and inverse_sqrt"
            )
        if (self.warmup_ratio or 0) + (self.cooldown_ratio or 0) > 1:
            problems.append("cooldown_ratio: with warmup_ratio it is more than all steps; allowed: at most 1 together")
        return self._without(problems)

    def num_warmup_steps(self, num_steps: int) -> int:
        """Return how many of `num_steps` steps warm up."""
        if self.warmup_ratio is None:
            return self.warmup_steps
        return math.ceil(round(num_steps * self.warmup_ratio, 9))  # not 4 for 30 * 0.1

    def num_cooldown_steps(self, num_steps: int) -> int:
        """Return how many of `num_steps` steps, the last ones, cool down."""
        ratio = self.cooldown_ratio
        if ratio is None:
            ratio = DEFAULT_WSD_COOLDOWN if self.schedule == "wsd" else 0.0
        return min(math.ceil(round(num_steps * ratio, 9)), num_steps - min(num_steps, self.num_warmup_steps(num_steps)))


ExportedPart = Literal["model", "adapter", "generator"]  # of a run, that is written for other programs


class CheckpointSettings(Section):
    """When to save, and what to keep."""

    every: int = setting(
        100, ge=0, affects=NOTHING, description="Steps between checkpoints. 0: save only at the end of the run."
    )
    keep: PositiveInt = setting(
        2,
        affects=NOTHING,
        description="How many of the newest good checkpoints to keep. In a stretch of unusual steps (not finite, or "
        "loss or gradient norm far above the last hundred steps) the newest one from before is kept too.",
    )
    async_save: bool = setting(
        True,
        affects=NOTHING,
        description="Write checkpoints from a copy in host memory while training continues. false: training waits.",
    )
    max_failures: PositiveInt = setting(
        3, affects=NOTHING, description="Failed saves in a row (for example on a full disk) before the run ends."
    )
    remote: SourcePath | None = setting(
        None,
        affects=NOTHING,
        added_later=True,
        description="The URL of a place in an object store, as `s3://bucket/run`, to which complete checkpoints are "
        "copied beside the training, and from which `--resume` fetches the newest one where the run's folder has none "
        "as new. Hugging Face folders of `hf_every` follow. Credentials come from the environment. Default: none.",
    )
    hf_every: int = setting(
        0,
        ge=0,
        affects=NOTHING,
        added_later=True,
        description="Steps between checkpoints that are also written as Hugging Face folders, beside the training: "
        "`hf/step-NNNNNNNN` in the run's folder has what `mmtrain export` writes. The last step has one too. 0: never.",
    )
    hf_keep: PositiveInt | None = setting(
        None,
        affects=NOTHING,
        added_later=True,
        description="How many of the newest of these folders to keep, beside that of the best step (`train.best`) if "
        "it has one. Default: all.",
    )
    hf_part: ExportedPart = setting(
        "model",
        affects=NOTHING,
        added_later=True,
        description="What they hold: the `model` with adapters merged, the `adapter` alone for `peft`, or the image "
        "`generator` alone for `diffusers`.",
    )

    @model_validator(mode="after")
    def _check_remote(self) -> Self:
        problems = []
        if self.remote is not None:
            try:
                require_object_store("remote", self.remote)
            except ValueError as error:
                problems.append(f"{error}. A folder of this machine is the run's own (run_dir)")
        return self._without(problems)

    @model_validator(mode="after")
    def _check_folders(self) -> Self:
        without = "without hf_every, which alone reads it; set hf_every"
        problems = []
        if not self.hf_every and self.hf_keep is not None:
            problems.append(f"hf_keep: found {self.hf_keep} {without}")
        if not self.hf_every and self.hf_part != "model":
            problems.append(f"hf_part: found {self.hf_part} {without}")
        return self._without(problems)


class CorruptionCheckSettings(Section):
    """When to look for bits of weights and optimizer state that changed by themselves."""

    every: int = setting(
        100,
        ge=0,
        le=1000,
        affects=NOTHING,
        added_later=True,
        description="Steps between two looks at the sums that every rank takes around each update. There is one before "
        "each checkpoint too, and one after weights were loaded. 0: no sums are taken.",
    )


class PeerCopySettings(Section):
    """Copies of weights and optimizer state in host memory, from which a run that fails goes on."""

    every: int = setting(
        0,
        ge=0,
        affects={"plan"},
        added_later=True,
        description="Steps between two copies of what a checkpoint holds, made beside the training into the memory of "
        "the rank's node and of its peer on another node. A run that fails loses so many finished steps at most. "
        "0: no copies.",
    )
    folder: str = setting(
        "/dev/shm",
        affects=NOTHING,
        added_later=True,
        description="Folder in the memory of every node, which outlives processes. Each rank needs room for two "
        "copies of its state there, or for four on several nodes.",
    )


HELD_OUT_PREFIX = "val_"  # of the names of what is measured on held-out samples, in `metrics.jsonl`
HELD_OUT_LOSSES = ("val_loss", "val_drawing_loss")


class BestSettings(Section):
    """The checkpoint with the best value of a metric, and when a run ends because none is better any more."""

    metric: str = setting(
        affects=NOTHING,
        description="What decides, as `metrics.jsonl` names it: `val_loss`, `val_drawing_loss` (of `validate_every`), "
        "`val_exact`, or `val_` and a name of `train.metrics` (of `evaluate_every`). Another one starts anew.",
    )
    higher_is_better: bool | None = setting(
        None,
        affects=NOTHING,
        description="Whether a higher value is better. Default: not for losses and `val_wer`, yes for others of "
        "mmtrain. A plug-in's metric must say.",
    )
    patience: PositiveInt | None = setting(
        None,
        affects=NOTHING,
        description="Measurements in a row that gain at most `min_gain`, after which the run ends early. Default: it "
        "does not.",
    )
    min_gain: float = setting(
        0.0,
        ge=0,
        affects=NOTHING,
        description="By how much a value must be better than the best so far, for `patience`.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = []
        if self.min_gain and self.patience is None:
            problems.append(f"min_gain: found {self.min_gain:g} without patience, which alone reads it; set patience")
        return self._without(problems)

    @property
    def of_loss(self) -> bool:
        """Whether `validate_every` measures it; else `evaluate_every` does."""
        return self.metric in HELD_OUT_LOSSES

    @property
    def rises(self) -> bool | None:
        """Whether a higher value is better; None if nothing says so."""
        if self.higher_is_better is not None:
            return self.higher_is_better
        return False if self.of_loss else higher_is_better(self.metric.removeprefix(HELD_OUT_PREFIX))


class LoraSettings(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685): they train in place of the weights, which are frozen.

    A linear W with an adapter computes W x + (alpha / rank) B A x. B starts at zero. See `scaling` for other factors.
    """

    rank: PositiveInt = setting(
        16, le=4096, affects={"plan", "resume"}, description="Features between A and B: rows of A, columns of B."
    )
    alpha: PositiveFloat = setting(
        32.0, affects={"plan", "resume"}, description="An adapter's output is scaled by `alpha` / `rank`."
    )
    scaling: Literal["standard", "rslora"] = setting(
        "standard",
        affects={"plan", "resume"},
        added_later=True,
        description="`rslora` (arXiv 2312.03732): the output is scaled by `alpha` / sqrt(`rank`), so that high ranks "
        "learn as fast as low ones.",
    )
    dropout: Annotated[float, Field(ge=0, le=0.99)] = setting(
        0.0,
        affects={"plan", "resume"},
        added_later=True,
        description="Probability with which an adapter ignores an input of its own while it trains; the others are "
        "scaled by 1 / (1 - `dropout`). Masks depend on seed, step, sample, place and linear, not on the plan.",
    )
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = setting(
        ("llm.*.linear_*",),
        affects={"plan", "resume"},
        description="The linears with an adapter, as patterns over names like "
        "`llm.layers.3.self_attention.linear_qkv`, with `*`, `?` and `[0-3]`. Blocks have `linear_qkv` (query, key and "
        "value; `linear_in` in a gated DeltaNet), `linear_proj`, `linear_fc1` (gate and up) and `linear_fc2`, mixtures "
        "those of `mlp.experts.*` and of `mlp.shared`; `vision.projector` has `linear_1` and `linear_2`. In the LLM, "
        "`linear_q`, `linear_k`, `linear_v`, `linear_fc1_gate` and `linear_fc1_up` name parts, which have an A each.",
    )
    also_train: tuple[str, ...] = setting(
        (),
        affects={"plan", "resume"},
        description="Parameters that train fully beside the adapters, as patterns like those of `freeze`: "
        "`vision.projector.*`. All others are frozen. What `freeze` names stays frozen.",
    )

    @property
    def scale(self) -> float:
        """By what an adapter's output is multiplied."""
        return self.alpha / (math.sqrt(self.rank) if self.scaling == "rslora" else self.rank)


class ProfileSettings(Section):
    """Steps to profile with torch's own profiler, beside the run's traces."""

    steps: tuple[PositiveInt, PositiveInt] = setting(
        affects=NOTHING,
        description="The first and the last step to profile, counted from 1. Each rank writes their operators and "
        "kernels to `profile/rank-N.json.gz` in the run's folder (for Perfetto).",
    )
    memory: bool = setting(
        False,
        affects=NOTHING,
        description="Also record allocations. On CUDA, each rank writes `profile/memory-rank-N.pickle`, which "
        "pytorch.org/memory_viz draws.",
    )

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        first, last = self.steps
        problem = f"train.profile.steps: found [{first}, {last}], allowed: the first step, then the last"
        return self._without([problem] if first > last else [])


# A name of an entry point, or `module:function`; `mmtrain.plugins` finds what it names.
PluginName = Annotated[str, Field(pattern=r"^[\w.-]+(:[\w.]+)?$")]
KernelSetting = Literal["auto", "torch", "fused"]


class TrainSettings(Section):
    """The training run."""

    steps: PositiveInt | None = setting(
        None, affects=NOTHING, description="Number of optimizer steps. Either this or `epochs`."
    )
    epochs: PositiveFloat | None = setting(
        None,
        affects=NOTHING,
        added_later=True,
        description="Passes over the data, instead of `steps`: as many steps as they take. An epoch is then a whole "
        "number of steps and uses each sample as often as its `weight` says; some groups of its last step hold fewer "
        "samples. A finished run goes on with more.",
    )
    global_batch: BatchSize = setting(
        affects={"plan", "steps", "resume"},
        description="One optimizer step, over all replicas: a number of groups (packed sequences), or `{samples: N}` "
        "or `{tokens: N}`, which is as many groups as hold N samples or LLM tokens of the data on average.",
    )
    seed: int = setting(
        0, ge=0, affects={"steps", "resume"}, description="Seed of the initial weights and of the data order."
    )
    precision: Literal["auto", "fp32", "bf16"] = setting(
        "auto",
        affects={"plan"},
        description="Precision of weights and activations. `auto`: fp32 on a CPU; on CUDA bf16 with fp32 master "
        "weights.",
    )
    grad_reduce: Literal["fp32", "bf16"] = setting(
        "fp32",
        affects={"plan"},
        added_later=True,
        description="Type in which data-parallel replicas send each other gradients. `bf16` halves the bytes: every "
        "replica rounds its own sum once, and adds up in fp32 what the others send, in their order, so that a step "
        "repeats its bits. Local sums, the optimizer, shared embeddings, sums over a tensor-parallel group and those "
        "between copies of a shard stay fp32.",
    )
    deterministic: bool = setting(
        False,
        affects=NOTHING,
        description="Use only operations that repeat their bits, on GPUs at the price of speed. A resumed run "
        "then continues bit for bit there too; on a CPU it always does.",
    )
    optimizer: OptimizerSettings = Field(description="The optimizer and its learning-rate schedule.")
    checkpoint: CheckpointSettings = Field(CheckpointSettings(), description="When to save checkpoints.")
    validate_every: int = setting(
        0, ge=0, affects=NOTHING, description="Steps between computations of the validation loss. 0: never."
    )
    validate_batches: PositiveInt = setting(
        4, affects=NOTHING, description="Global batches of one computation of the validation loss."
    )
    evaluate_every: int = setting(
        0,
        ge=0,
        affects=NOTHING,
        description="Steps between evaluations, in which the model answers held-out questions. 0: never.",
    )
    evaluate_questions: PositiveInt = setting(64, affects=NOTHING, description="Most questions of one evaluation.")
    best: BestSettings | None = setting(
        None,
        affects=NOTHING,
        added_later=True,
        description="Keep the checkpoint with the best value of a metric, and end early when it gains no more. "
        "Default: the newest checkpoints are kept, and all steps are trained.",
    )
    trace_steps: tuple[PositiveInt, ...] = setting(
        (),
        affects=NOTHING,
        description="Steps, counted from 1, whose timelines are written to the run's `trace.json` (for Perfetto).",
    )
    profile: ProfileSettings | None = setting(
        None, affects=NOTHING, description="Steps to profile with torch's own profiler. Default: none."
    )
    loggers: tuple[PluginName, ...] = setting(
        ("tensorboard",),
        affects=NOTHING,
        description="Experiment trackers that show the run: `tensorboard`, `wandb`, `mlflow`, `trackio`. Each writes "
        "into the run's folder, or to the server that its own environment variables name. Others are plug-ins: a name "
        "in the group `mmtrain.loggers`, or `module:function`. `metrics.jsonl` is always written.",
    )
    hooks: tuple[PluginName, ...] = setting(
        (),
        affects=NOTHING,
        description="Plug-ins to run around each step, as names in the group `mmtrain.hooks` or as `module:function`.",
    )
    metrics: MetricNames = setting(
        (),
        affects=NOTHING,
        description="What scores the answers of `evaluate_every` and of `mmtrain evaluate`, beside exact matches: "
        "`contains`, `anls`, `f1`, `wer`, `regex=PATTERN`. Others are plug-ins: a name in the group `mmtrain.metrics`, "
        "or `module:function`.",
    )
    max_nonfinite_steps: PositiveInt = setting(
        10,
        affects=NOTHING,
        description="Steps in a row with a non-finite gradient before the run ends. Such steps update no weights.",
    )
    watchdog_s: float = setting(
        300.0,
        ge=0,
        le=540,
        affects=NOTHING,
        description="Seconds in which no action starts and no file of a checkpoint makes progress, after which the run "
        "ends with a report of what each rank waits for. Below torch's own timeout of 600 s. 0: no watchdog.",
    )
    corruption_check: CorruptionCheckSettings = Field(
        CorruptionCheckSettings(), description="When to look for state that changed by itself."
    )
    peer_copies: PeerCopySettings = Field(
        PeerCopySettings(), description="Copies of the run's state in host memory, beside its checkpoints."
    )
    on_corruption: Literal["stop", "restore"] = setting(
        "stop",
        affects=NOTHING,
        added_later=True,
        description="What to do when weights or optimizer state of a rank have changed by themselves. `stop`: end the "
        "run; the newest checkpoint is from before. `restore`: go on from it in the same processes.",
    )
    replan: Literal["off", "tell"] = setting(
        "tell",
        affects=NOTHING,
        description="What to do when recorded actions differ from the plan's costs by more than 10% for 50 steps in a "
        "row. `tell`: plan again beside the training with the recorded costs, and say what a better plan would gain. "
        "`off`: compare nothing.",
    )
    init_from: Path | None = setting(
        None,
        affects=NOTHING,
        description="The folder of another run, whose checkpoint (see `init_checkpoint`) gives the weights to start "
        "from, that of an adapter in the form of `peft` for `model.hf`, or one of torch.distributed.checkpoint (DCP) "
        "with the names of the Hugging Face folder. The optimizer and the data start anew. Relative paths start at the "
        "recipe's folder. Default: the weights of `model.hf`, or random ones.",
    )
    init_checkpoint: Literal["newest", "best"] | PositiveInt = setting(
        "newest",
        affects=NOTHING,
        added_later=True,
        description="Which checkpoint of the run in `init_from`: the `newest` good one, the `best` one by its "
        "`train.best`, or that of a step.",
    )
    init_optimizer: bool = setting(
        False,
        affects=NOTHING,
        added_later=True,
        description="Also start the optimizer from the DCP folder in `init_from`: master weights, moments and the "
        "number of updates. The learning-rate schedule and the data start anew.",
    )
    freeze: tuple[str, ...] = setting(
        (),
        affects={"plan", "resume"},
        description="Further parameters not to train, as patterns over names like "
        "`llm.layers.3.mlp.linear_fc1.weight`, with `*`, `?` and `[0-3]`. Layer 0 of a unit is its embedding; "
        "`vision.projector` is another name of the encoder's last layer.",
    )
    lora: LoraSettings | None = setting(
        None,
        affects={"plan", "resume"},
        description="Train low-rank adapters and freeze the model. Default: train the model itself.",
    )
    attention: Literal["auto", "flash_attn_3", "flash_attn_4", "flash_attn", "varlen", "sdpa", "reference"] = setting(
        "auto",
        affects=NOTHING,
        description="Attention backend. `auto`: the first of `flash_attn_3`, `flash_attn_4`, `flash_attn` "
        "(FlashAttention-2), `varlen` (the same kernels inside torch) and `sdpa` that works with this GPU, the "
        "installed packages, the precision and the width of the unit's heads; `mmtrain doctor` says which. Whatever it "
        "is, `sdpa` computes the tokens of images that see each other (`model.llm.image_attention`).",
    )
    kernels: KernelSetting = setting(
        "auto",
        affects=NOTHING,
        description="Kernels of the operations between GEMMs: rotation, SwiGLU, residual sum and RMSNorm. `torch`: "
        "torch's. `fused`: those of liger-kernel, one for each operation; they need a CUDA device. `auto`: `fused` "
        "where they can run. `mmtrain doctor` and the start of a run say which are used.",
    )

    @property
    def num_steps(self) -> int:
        """Return the number of optimizer steps. A recipe that states epochs gets it by `Recipe.with_steps`."""
        assert self.steps is not None, "the steps of the epochs are not counted yet"
        return self.steps

    @property
    def num_groups(self) -> int:
        """Return the groups of a step. A recipe that leaves them to data or plan gets them by `Recipe.with_groups`."""
        assert isinstance(self.global_batch, int), "the groups of a step are not counted yet"
        return self.global_batch
