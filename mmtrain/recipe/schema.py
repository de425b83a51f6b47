"""The recipe: every setting that a user may write, with its unit, range and default.

A recipe is a YAML file; `mmtrain.recipe.load_recipe` turns it into the frozen `Recipe` below. Field names are the
dotted paths in error messages (`data.seq_len`) and in `--set`. `model_settings` holds the settings of the units.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from mmtrain.recipe.model_settings import ModelSettings
from mmtrain.recipe.settings import NOTHING, PositiveFloat, PositiveInt, Section, setting

DecayRate = Annotated[float, Field(ge=0, lt=1)]


class SourceSettings(Section):
    """Samples of one format, in one file or several."""

    path: Path = setting(
        affects={"plan", "lengths"},
        description="A file of samples, a folder of such files, or several files as `train-{000..123}.tar`, "
        "`{a,b}.json` or `*.parquet`. Relative paths start at the recipe's folder.",
    )
    format: Literal["llava", "messages", "webdataset", "parquet", "lengths"] | None = setting(
        None,
        affects={"plan", "lengths"},
        description="`llava`: JSON or JSONL with `conversations`. `messages`: JSON or JSONL with `messages` (ShareGPT, "
        "OpenAI). `webdataset`: tar shards. `parquet`: Parquet files. `lengths`: a CSV file of lengths without "
        "samples, to plan with. Default: from the file's suffix; for JSON from the keys of each entry.",
    )
    image_root: Path | None = setting(
        None,
        affects={"plan", "lengths"},
        description="Folder that relative paths of images, clips and videos start at. Media must lie inside it. "
        "Default: the folder of the data file.",
    )
    weight: float = setting(
        1.0, gt=0, affects={"plan"}, description="How often an epoch uses each sample of this source; 2 means twice."
    )

    @property
    def states_lengths(self) -> bool:
        """Return whether the source holds lengths only, without samples."""
        return is_lengths_source(self.path, self.format)


def is_lengths_source(path: Path, format: str | None) -> bool:
    """Return whether a source with this path and format holds lengths only, without samples."""
    return format == "lengths" or (format is None and path.suffix == ".csv")


class LimitSettings(Section):
    """Limits on what an archive, possibly from an untrusted origin, may demand of this machine."""

    max_member_bytes: PositiveInt = setting(
        1 << 30,
        affects={"plan", "lengths", "steps"},
        description="Largest member of a tar shard or cell of a Parquet file, in bytes. Larger ones are quarantined.",
    )
    max_members: PositiveInt = setting(
        10_000_000,
        affects={"plan", "lengths", "steps"},
        description="Most members of a tar shard or rows of a Parquet file. Those beyond are quarantined.",
    )


class ImageSettings(Section):
    """How an image becomes patches."""

    scheme: Literal["native", "tiles", "fixed"] = setting(
        "native",
        affects={"plan", "lengths", "steps", "resume"},
        description="`native` (Qwen2-VL): keep the aspect ratio, scale the area into [`min_pixels`, `max_pixels`], and "
        "round the sides to multiples of merged patches. `tiles` (InternVL): cut the image into up to `max_tiles` "
        "squares of `tile` pixels, on the canvas with the closest aspect ratio; if there are several, one more square "
        "shows the entire image. `fixed`: bring it to `size` x `size`, as `fit` says.",
    )
    tile: PositiveInt = setting(
        448, affects={"plan", "lengths", "steps", "resume"}, description="Side of one tile in pixels, for `tiles`."
    )
    max_tiles: int = setting(
        12,
        ge=1,
        le=256,
        affects={"plan", "lengths", "steps", "resume"},
        description="Most tiles of one image, for `tiles`. The square that shows the entire image is not counted.",
    )
    size: PositiveInt = setting(
        224, affects={"plan", "lengths", "steps", "resume"}, description="Side of an image in pixels, for `fixed`."
    )
    fit: Literal["stretch", "crop", "pad"] = setting(
        "stretch",
        affects={"plan", "steps", "resume"},
        added_later=True,
        description="How an image that is no square becomes one, for `fixed`. `stretch` (SigLIP): change its aspect "
        "ratio. `crop` (CLIP): cut out its middle. `pad` (LLaVA): add borders in the color `mean`.",
    )
    resample: Literal["bilinear", "bicubic", "lanczos"] = setting(
        "bicubic",
        affects={"plan", "steps", "resume"},
        added_later=True,
        description="Filter that resizes images and frames.",
    )
    decode: Literal["scaled", "full"] = setting(
        "scaled",
        affects={"plan", "steps", "resume"},
        added_later=True,
        description="How a JPEG is read that is much larger than needed. `scaled`: at 1/2, 1/4 or 1/8 of its size, "
        "several times faster. `full`: all its pixels, as the processors of published models do.",
    )
    min_pixels: PositiveInt = setting(
        28 * 28,
        affects={"plan", "lengths", "steps", "resume"},
        description="Smallest area of an image in pixels, for `native`.",
    )
    max_pixels: PositiveInt = setting(
        448 * 448,
        affects={"plan", "lengths", "steps", "resume"},
        description="Largest area of an image in pixels, for `native`.",
    )
    max_source_pixels: PositiveInt = setting(
        100_000_000,
        affects={"plan", "lengths", "steps", "resume"},
        description="Largest area of a source image in pixels. Larger ones are quarantined before they are decoded "
        "(decompression bombs).",
    )
    mean: tuple[float, float, float] = setting(
        (0.5, 0.5, 0.5),
        affects={"plan", "steps", "resume"},
        description="Subtracted from the RGB values, which are in [0, 1].",
    )
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = setting(
        (0.5, 0.5, 0.5),
        affects={"plan", "steps", "resume"},
        description="The RGB values are divided by this after `mean` was subtracted.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> "ImageSettings":
        problems = []
        if self.scheme != "fixed" and self.fit != "stretch":
            problems.append(
                f"fit is `{self.fit}`, but only images of scheme `fixed` change their aspect: leave fit out, or set "
                "scheme to fixed"
            )
        return self._without(problems)


class VideoSettings(Section):
    """How a video becomes images."""

    max_frames: PositiveInt = setting(
        8,
        affects={"plan", "lengths", "steps", "resume"},
        description="Most frames taken from a video, evenly spaced. Each becomes one image (one tile with `tiles`).",
    )


class AudioDataSettings(Section):
    """How a clip becomes log-mel frames: it is resampled to 16 kHz, with one frame every 10 ms."""

    scheme: Literal["dynamic", "fixed"] = setting(
        "dynamic",
        affects={"plan", "lengths", "steps", "resume"},
        description="`dynamic`: as long as the clip. `fixed` (Whisper): every clip is padded with silence to "
        "`max_seconds`.",
    )
    max_seconds: float = setting(
        30.0,
        gt=0,
        affects={"plan", "lengths", "steps", "resume"},
        description="Longest clip in seconds. Samples with a longer clip are quarantined.",
    )


class DataSettings(Section):
    """What to train on, and how samples become microbatches."""

    sources: Annotated[tuple[SourceSettings, ...], Field(min_length=1)] = Field(description="Training samples.")
    validation: tuple[SourceSettings, ...] = setting(
        (), affects=NOTHING, description="Held-out samples for the validation loss and for `mmtrain evaluate`."
    )
    tokenizer: Path | None = setting(
        None,
        affects={"plan"},
        description="A folder of a Hugging Face model with `tokenizer.json` and a chat template, or a JSON file of the "
        "`tokenizers` library with the special tokens of mmtrain's own chat format. Relative paths start at the "
        "recipe's folder. Default: the folder of `model.hf`, if it has a tokenizer. Required unless all sources hold "
        "lengths only.",
    )
    seq_len: PositiveInt = setting(
        affects={"plan", "lengths", "steps", "resume"},
        description="Most LLM tokens of one group. A group is one packed sequence and one LLM microbatch.",
    )
    max_sample_tokens: PositiveInt | None = setting(
        None,
        affects={"plan", "lengths", "steps"},
        description="Most LLM tokens of one sample. Longer samples are quarantined. Default: `seq_len`.",
    )
    max_images: PositiveInt = setting(
        64,
        affects={"plan", "lengths", "steps"},
        description="Most images of one sample, counting frames of videos. Samples with more are quarantined.",
    )
    image: ImageSettings = Field(ImageSettings(), description="How an image becomes patches.")
    video: VideoSettings = Field(VideoSettings(), description="How a video becomes images.")
    audio: AudioDataSettings = Field(AudioDataSettings(), description="How a clip becomes log-mel frames.")
    grouping: Literal["matched", "isf", "random", "length", "device"] = setting(
        "matched",
        affects={"plan", "steps", "resume"},
        description="How samples become groups. `matched`: a search fills the groups, and groups of similar cost run "
        "at the same time. `isf`: iterative sampling and filtering from a shuffle (OmniBal). The others are baselines "
        "with as many samples in a group as fill it on average, fewer if they do not fit: `random`; `length`: samples "
        "of similar length share a group; `device`: similar lengths across data-parallel ranks.",
    )
    budgets: dict[str, PositiveInt] = setting(
        {},
        affects={"plan", "steps", "resume"},
        description="Most tokens of an encoder in one group, by unit (`vision: 4096`). A sample above a budget shares "
        "its group with no other sample that uses this encoder. Default: no limit; for `isf` in proportion to "
        "`seq_len`.",
    )
    long_sample_tokens: PositiveInt | None = setting(
        None,
        affects={"plan", "steps", "resume"},
        formerly="long_tokens",
        description="Samples with more LLM tokens than this train in separate steps. Default: no separate steps.",
    )
    index_cache: Path | None = setting(
        None,
        affects=NOTHING,
        description="Folder for the index of large sources, so that the next run need not read them again. Default: "
        "`.mmtrain-index` next to the first data file; no cache if that folder cannot be written.",
    )
    grouping_window: PositiveInt = setting(
        16384,
        affects={"plan", "steps", "resume"},
        formerly="window",
        description="Samples among which grouping may choose. No sample moves further from its shuffled position.",
    )
    limits: LimitSettings = Field(LimitSettings(), description="Limits on what an archive may demand.")
    max_bad_rate: float = setting(
        0.01, ge=0, le=1, affects=NOTHING, description="Fraction of quarantined samples above which the run stops."
    )
    prefetch: int = setting(
        2, ge=0, le=64, affects=NOTHING, description="Steps prepared ahead in the background. 0: no background work."
    )
    workers: int | None = setting(
        None,
        ge=0,
        le=256,
        affects=NOTHING,
        description="Processes in which each rank prepares steps. 0: a thread of the rank. Default: up to 4 for ranks "
        "that load media, if there are spare CPU cores.",
    )
    producers: tuple[Annotated[str, Field(pattern=r"^(tcp|ipc)://.+$")], ...] = setting(
        (),
        affects=NOTHING,
        description="Addresses of `mmtrain data serve` processes that prepare steps of this recipe "
        "(`tcp://node7:5557`). While none answers, the ranks prepare steps themselves.",
    )
    producer_secret: Path | None = setting(
        None,
        affects=NOTHING,
        description="File with a secret of 32 bytes or more that producers and trainers share, readable by its owner "
        "alone (mode 600). By it they know each other, and what they send is encrypted. Relative paths start at the "
        "recipe's folder. Required to listen on more than the loopback interface.",
    )
    producer_timeout_s: float = setting(
        10.0,
        ge=0.1,
        le=86400,
        affects=NOTHING,
        description="Seconds without a message after which a producer counts as lost and others take over its steps.",
    )
    producer_step_timeout_s: float = setting(
        60.0,
        ge=0.1,
        le=86400,
        affects=NOTHING,
        description="Seconds in which a producer that owes steps makes none, after which others make them although it "
        "still answers. It is tried again later, each time after a longer pause. Keep this below `train.watchdog_s`.",
    )

    @property
    def tokenizer_path(self) -> Path:
        """Return the tokenizer of a recipe that has samples: a file, or a folder with a chat template."""
        assert self.tokenizer is not None, "`cross_checks` rejects recipes that have samples and no tokenizer"
        return self.tokenizer


class UnitParallel(Section):
    """Fixed parallel degrees of one unit. The planner chooses what is left out."""

    tp: PositiveInt | None = setting(
        None,
        affects={"plan"},
        description="Tensor-parallel degree. Must divide `heads`; must divide `kv_heads` or be a multiple of it.",
    )
    pp: PositiveInt | None = setting(None, affects={"plan"}, description="Pipeline-parallel degree.")
    dp: PositiveInt | None = setting(
        None, affects={"plan"}, description="Data-parallel degree. Must divide `train.global_batch`."
    )
    vpp: PositiveInt | None = setting(
        None,
        affects={"plan"},
        description="Model chunks on each pipeline rank (interleaved schedule). The same for all units in `unified`, "
        "1 for encoders in `colocated`.",
    )
    sp: bool | Literal["auto"] = setting(
        "auto",
        affects={"plan"},
        description="Sequence parallelism: the ranks of a tensor-parallel group shard the tokens in norms and residual "
        "connections. Needs tp above 1. `auto`: if it costs no time, or if nothing fits into memory without it.",
    )
    num_microbatches: PositiveInt | None = setting(
        None,
        affects={"plan"},
        description="Microbatches of each replica in one step. The LLM's number times its dp is `train.global_batch`. "
        "An encoder's number divides the LLM's (one encoder microbatch serves several LLM microbatches) or is a "
        "multiple of it. Default: the LLM's number.",
    )
    recompute: Literal["auto", "none", "all"] = setting(
        "auto",
        affects={"plan"},
        description="Activation recomputation in backward. `auto`: for as few layers as memory allows. `none`: no "
        "layers. `all`: all layers.",
    )


class ParallelSettings(Section):
    """Constraints on the plan."""

    placement: Literal["auto", "unified", "disaggregated", "colocated"] = setting(
        "auto",
        affects={"plan"},
        description="How units share ranks. `unified`: one pipeline holds the layers of all units. `disaggregated`: "
        "every unit has ranks of its own. `colocated`: encoders run on the LLM's ranks while these would be idle. "
        "`auto`: the fastest.",
    )
    vision: UnitParallel = Field(UnitParallel(), description="Parallel degrees of the vision encoder.")
    audio: UnitParallel = Field(UnitParallel(), description="Parallel degrees of the audio encoder.")
    encoders: dict[str, UnitParallel] = Field({}, description="Parallel degrees of `model.encoders`, by their names.")
    llm: UnitParallel = Field(UnitParallel(), description="Parallel degrees of the LLM.")
    max_gpus: PositiveInt | None = setting(
        None,
        affects={"plan"},
        description="Most ranks that a plan may use. It uses fewer if that is faster. Default: exactly all ranks of "
        "the cluster.",
    )
    generator: UnitParallel = Field(
        UnitParallel(), description="Parallel degrees of the generator. A U-Net supports data parallelism only."
    )

    def of(self, unit: str) -> UnitParallel:
        """Return the parallel degrees that the recipe fixes for a unit."""
        if unit not in self._short_forms():
            return self.encoders.get(unit, UnitParallel())
        degrees: UnitParallel = getattr(self, unit)
        return degrees

    @classmethod
    def _short_forms(cls) -> list[str]:
        """Return the fields that hold the degrees of one unit each."""
        return [name for name, field in cls.model_fields.items() if field.annotation is UnitParallel]


class ClusterSettings(Section):
    """The hardware to plan for."""

    hardware: str = setting(
        "auto",
        affects={"plan"},
        description="A hardware preset (`cpu-core`, `a100-80g`, `h100-80g`, `h200-141g`). `auto`: this machine's.",
    )
    ranks: PositiveInt | None = setting(
        None,
        affects={"plan"},
        description="Number of ranks. Default: the launcher's world size; without a launcher the GPUs of this machine, "
        "or 2 on a CPU.",
    )
    ranks_per_node: PositiveInt | None = setting(
        None, affects={"plan"}, description="Ranks on one node. Default: the preset's."
    )
    memory_gib: float | None = setting(
        None, gt=0, affects={"plan"}, description="Memory of a rank in GiB. Default: the preset's."
    )
    costs: Path | None = setting(
        None,
        affects={"plan"},
        description="A cost table: a file written by `mmtrain profile`, or the name of a table that comes with mmtrain "
        "(`cpu-core`, `h200-141g`). Default: analytic costs of the preset.",
    )


class OptimizerSettings(Section):
    """AdamW and its learning-rate schedule."""

    lr: float = setting(gt=0, affects=NOTHING, description="Peak learning rate.")
    min_lr: float = setting(0.0, ge=0, affects=NOTHING, description="Learning rate at the end of the schedule.")
    schedule: Literal["cosine", "linear", "constant"] = setting(
        "cosine", affects=NOTHING, description="Shape of the learning-rate decay after warm-up."
    )
    warmup_steps: int = setting(0, ge=0, affects=NOTHING, description="Steps of linear warm-up from 0.")
    betas: tuple[DecayRate, DecayRate] = setting(
        (0.9, 0.95), affects=NOTHING, description="Decay rates of Adam's two moments, each in [0, 1)."
    )
    eps: float = setting(1e-8, gt=0, affects=NOTHING, description="Adam's epsilon.")
    weight_decay: float = setting(
        0.0, ge=0, affects=NOTHING, description="Decoupled weight decay of matrices; norms and biases do not decay."
    )
    clip_norm: float | None = setting(
        1.0, gt=0, affects=NOTHING, description="Clip the global gradient norm to this value. null: do not clip."
    )


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
        formerly="background",
        description="Write checkpoints from a copy in host memory while training continues. false: training waits.",
    )
    max_failures: PositiveInt = setting(
        3, affects=NOTHING, description="Failed saves in a row (for example on a full disk) before the run ends."
    )


class TrainSettings(Section):
    """The training run."""

    steps: PositiveInt = setting(affects=NOTHING, description="Number of optimizer steps.")
    global_batch: PositiveInt = setting(
        affects={"plan", "steps", "resume"},
        description="Groups (packed sequences) of one optimizer step, over all replicas.",
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
    optimizer: OptimizerSettings = Field(description="AdamW and its learning-rate schedule.")
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
    trace_steps: tuple[PositiveInt, ...] = setting(
        (),
        affects=NOTHING,
        formerly="trace",
        description="Steps, counted from 1, whose timelines are written to the run's `trace.json` (for Perfetto).",
    )
    max_nonfinite_steps: PositiveInt = setting(
        10,
        affects=NOTHING,
        formerly="max_bad_steps",
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
    replan: Literal["off", "tell", "auto"] = setting(
        "tell",
        affects=NOTHING,
        description="What to do when recorded actions differ from the plan's costs by more than 10% for 50 steps in a "
        "row. `tell`: plan again beside the training with the recorded costs, and say what a better plan would gain. "
        "`auto`: also switch to it at the next checkpoint. `off`: compare nothing.",
    )
    freeze: tuple[str, ...] = setting(
        (),
        affects={"plan", "resume"},
        description="Further parameters not to train, as patterns over names like "
        "`llm.layers.3.mlp.linear_fc1.weight`, with `*`, `?` and `[0-3]`. Layer 0 of a unit is its embedding.",
    )
    attention: Literal["auto", "flash_attn", "varlen", "sdpa", "reference"] = setting(
        "auto", affects=NOTHING, description="Attention backend. `auto`: the fastest that works on this machine."
    )


class Recipe(Section):
    """One training run: model, data, parallelism, hardware, training."""

    name: str = setting(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", affects=NOTHING, description="Name of the run and of its folder."
    )
    model: ModelSettings
    data: DataSettings
    parallel: ParallelSettings = Field(ParallelSettings())
    cluster: ClusterSettings = Field(ClusterSettings())
    train: TrainSettings
    run_dir: Path | None = setting(
        None,
        affects=NOTHING,
        description="Folder that the run writes to. Default: `runs/<name>` in the current folder.",
    )
