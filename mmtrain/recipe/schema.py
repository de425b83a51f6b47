"""The recipe: every setting a user may write, with its unit, range and default.

A recipe is a YAML file; `mmtrain.recipe.recipe_loader` turns it into the frozen `Recipe` below. Field names here are
the dotted paths of error messages (`data.seq_len`) and of `--set`. The units' settings are in `model`.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from mmtrain.recipe.model_settings import ModelSettings
from mmtrain.recipe.settings import PositiveFloat, PositiveInt, Section

DecayRate = Annotated[float, Field(ge=0, lt=1)]


class SourceSettings(Section):
    """Samples of one kind, in one file or several."""

    path: Path = Field(
        description="A file of samples, a folder of such, or several as `train-{000..123}.tar`, `{a,b}.json` or "
        "`*.parquet`; relative paths start at the recipe's folder."
    )
    format: Literal["llava", "messages", "webdataset", "parquet", "lengths"] | None = Field(
        None,
        description="`llava`: JSON or JSONL with `conversations`; `messages`: the same with `messages` (ShareGPT, "
        "OpenAI); `webdataset`: tar shards; `parquet`; `lengths`: a CSV file that states lengths, to plan with. "
        "Default: guessed from the file's ending, each JSON entry by its keys.",
    )
    image_root: Path | None = Field(
        None,
        description="Folder that paths of images, clips and videos start at, and may not lead out of. Default: that of "
        "the data file.",
    )
    weight: float = Field(1.0, gt=0, description="How often an epoch uses each sample of this source (2 = twice).")

    @property
    def states_lengths(self) -> bool:
        """Whether there are only lengths, no samples."""
        return is_lengths_source(self.path, self.format)


def is_lengths_source(path: Path, format: str | None) -> bool:
    """Whether a source of this path and format states lengths: there are no samples then."""
    return format == "lengths" or (format is None and path.suffix == ".csv")


class LimitSettings(Section):
    """What archives from anywhere may ask of this machine."""

    max_member_bytes: PositiveInt = Field(
        1 << 30, description="Larger members of tar shards and cells of Parquet files are set aside, in bytes."
    )
    max_members: PositiveInt = Field(
        10_000_000, description="Members of a tar shard, or rows of a Parquet file, above which the rest is set aside."
    )


class ImageSettings(Section):
    """How an image becomes patches."""

    scheme: Literal["native", "tiles", "fixed"] = Field(
        "native",
        description="`native` (Qwen2-VL): keep the aspect, scale into [`min_pixels`, `max_pixels`], sides rounded to "
        "whole merged patches; `tiles` (InternVL): up to `max_tiles` squares of `tile` pixels in the canvas whose "
        "aspect is nearest, and where there are several one more of the whole; `fixed`: resize to `size` x `size`.",
    )
    tile: PositiveInt = Field(448, description="Side in pixels of one of the `tiles`.")
    max_tiles: int = Field(12, ge=1, le=256, description="Most `tiles` of one image, beside the one of the whole.")
    size: PositiveInt = Field(224, description="Side in pixels for `fixed`.")
    min_pixels: PositiveInt = Field(28 * 28, description="Smallest area for `native`, in pixels.")
    max_pixels: PositiveInt = Field(448 * 448, description="Largest area for `native`, in pixels.")
    max_source_pixels: PositiveInt = Field(
        100_000_000, description="Refuse source images above this area before decoding them (decompression bombs)."
    )
    mean: tuple[float, float, float] = Field((0.5, 0.5, 0.5), description="Subtracted from RGB in [0, 1].")
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = Field(
        (0.5, 0.5, 0.5), description="RGB in [0, 1] minus mean is divided by this."
    )


class VideoSettings(Section):
    """How a video becomes images."""

    max_frames: PositiveInt = Field(
        8, description="Most frames, evenly spaced over the video; each becomes one image (one tile with `tiles`)."
    )


class AudioDataSettings(Section):
    """How a clip becomes log-mel frames: resampled to 16 kHz, one frame each 10 ms."""

    scheme: Literal["dynamic", "fixed"] = Field(
        "dynamic",
        description="`dynamic`: as long as the clip; `fixed` (Whisper): silence up to `max_seconds`, whatever the "
        "clip.",
    )
    max_seconds: float = Field(30.0, gt=0, description="Samples with a longer clip are set aside and counted.")


class DataSettings(Section):
    """What to train on and how samples become microbatches."""

    sources: Annotated[tuple[SourceSettings, ...], Field(min_length=1)] = Field(description="Training samples.")
    validation: tuple[SourceSettings, ...] = Field(
        (), description="Held-out samples for validation loss and `evaluate`."
    )
    tokenizer: Path | None = Field(
        None,
        description="A `tokenizers` JSON file; relative paths start at the recipe's folder. Only sources that state "
        "lengths need none.",
    )
    seq_len: PositiveInt = Field(description="Most LLM tokens in one group (one packed sequence, one LLM microbatch).")
    max_sample_tokens: PositiveInt | None = Field(
        None, description="Samples with more LLM tokens are set aside and counted. Default: `seq_len`."
    )
    max_images: PositiveInt = Field(
        64, description="Samples with more images, frames of videos included, are set aside and counted."
    )
    image: ImageSettings = Field(ImageSettings(), description="How an image becomes patches.")
    video: VideoSettings = Field(VideoSettings(), description="How a video becomes images.")
    audio: AudioDataSettings = Field(AudioDataSettings(), description="How a clip becomes log-mel frames.")
    grouping: Literal["matched", "isf", "random", "length", "device"] = Field(
        "matched",
        description="How samples become groups: `matched` fills groups by search and runs near-equal ones side by "
        "side; `isf` (OmniBal) fills them from a shuffle; baselines with as many samples a group as fill it on "
        "average, fewer where they would not fit: `random`; `length`, samples of similar length in a group; `device`, "
        "of similar length across replicas.",
    )
    budgets: dict[str, PositiveInt] = Field(
        {},
        description="Most tokens of an encoder in one group, by unit (`vision: 4096`); a sample above one alone shares "
        "its group with no other for that encoder. Default: no limit (`isf`: in proportion to `seq_len`).",
    )
    long_tokens: PositiveInt | None = Field(
        None, description="Samples with more LLM tokens than this train in steps of their own. Default: no such steps."
    )
    index_cache: Path | None = Field(
        None,
        description="Folder that keeps the index of large sources, so that the next run need not read them again. "
        "Default: `.mmtrain-index` beside the first data file; where that cannot be written, none.",
    )
    window: PositiveInt = Field(16384, description="Samples that grouping may look at together; bounds displacement.")
    limits: LimitSettings = Field(LimitSettings(), description="What archives may ask of this machine.")
    max_bad_rate: float = Field(0.01, ge=0, le=1, description="Share of unusable samples above which the run stops.")
    prefetch: int = Field(2, ge=0, le=64, description="Steps prepared ahead in the background; 0 prepares in line.")
    workers: int | None = Field(
        None,
        ge=0,
        le=256,
        description="Processes in which each rank prepares steps, one each beside those kept ready; 0: a thread. "
        "Default: up to 4 for ranks that load media, where there are cores to spare.",
    )
    producers: tuple[Annotated[str, Field(pattern=r"^(tcp|ipc)://.+$")], ...] = Field(
        (),
        description="Where `mmtrain data serve` prepares steps of this recipe (`tcp://node7:5557`); steps are prepared "
        "here while none answers.",
    )
    producer_timeout_s: float = Field(
        10.0,
        ge=0.1,
        le=86400,
        description="Silence in seconds after which a producer is given up and its steps go to others.",
    )

    @property
    def tokenizer_file(self) -> Path:
        """The tokenizer, where samples are read."""
        assert self.tokenizer is not None, "checks hold that recipes with samples have one"
        return self.tokenizer


class UnitParallel(Section):
    """Fixed sizes for one unit; what is left out is planned."""

    tp: PositiveInt | None = Field(
        None, description="Tensor-parallel ranks; divides heads, and divides kv_heads or is a multiple of them."
    )
    pp: PositiveInt | None = Field(None, description="Pipeline ranks.")
    dp: PositiveInt | None = Field(None, description="Data-parallel replicas; divides `train.global_batch`.")
    vpp: PositiveInt | None = Field(
        None,
        description="Chunks of layers on each pipeline rank (interleaving). In `unified` all units have the same "
        "number, in `colocated` encoders have one.",
    )
    sp: bool | Literal["auto"] = Field(
        "auto",
        description="Sequence parallelism, where tp is above 1: its ranks share out the tokens in norms and residuals. "
        "`auto`: where that costs no time, or nothing fits into memory without it.",
    )
    num_microbatches: PositiveInt | None = Field(
        None,
        description="Microbatches of each replica in a step. The LLM's fixes its dp: all are `train.global_batch`. "
        "An encoder's number divides the LLM's (each merges several of them) or is a multiple of it (each splits "
        "one); default: the LLM's.",
    )
    recompute: Literal["auto", "none", "all"] = Field(
        "auto",
        description="Whose activations are computed again in backward: of as few layers as memory allows (`auto`), of "
        "none, or of all.",
    )


class ParallelSettings(Section):
    """Constraints on the plan."""

    placement: Literal["auto", "unified", "disaggregated", "colocated"] = Field(
        "auto", description="How units share ranks."
    )
    vision: UnitParallel = Field(UnitParallel(), description="Fixed sizes of the vision unit.")
    audio: UnitParallel = Field(UnitParallel(), description="Fixed sizes of the audio unit.")
    llm: UnitParallel = Field(UnitParallel(), description="Fixed sizes of the LLM unit.")
    max_gpus: PositiveInt | None = Field(
        None,
        description="Most ranks that a plan may take; it may then take fewer, where that is faster. Default: all of "
        "the cluster's, exactly.",
    )
    generator: UnitParallel = Field(
        UnitParallel(), description="Fixed sizes of the generator; a U-Net is split by data parallelism alone."
    )


class ClusterSettings(Section):
    """The hardware to plan for."""

    hardware: str = Field(
        "auto", description="A hardware preset (`cpu-core`, `a100-80g`, `h100-80g`, `h200-141g`), or `auto`."
    )
    ranks: PositiveInt | None = Field(
        None,
        description="Number of ranks. Default: the launcher's world size; alone, the GPUs of this machine or two on a "
        "CPU.",
    )
    ranks_per_node: PositiveInt | None = Field(None, description="Ranks on one node. Default: the preset's.")
    memory_gib: float | None = Field(None, gt=0, description="Memory per rank in GiB. Default: the preset's.")
    costs: Path | None = Field(
        None,
        description="A cost table: a file made by `mmtrain profile`, or the name of one that comes with mmtrain "
        "(`cpu-core`, `h200-141g`). Default: costs are modelled from the preset.",
    )


class OptimizerSettings(Section):
    """AdamW."""

    lr: float = Field(description="Peak learning rate.", gt=0)
    min_lr: float = Field(0.0, ge=0, description="Learning rate at the end of the schedule.")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="Shape of the decay after warm-up.")
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up from zero.")
    betas: tuple[DecayRate, DecayRate] = Field((0.9, 0.95), description="Adam's moment decay rates.")
    eps: float = Field(1e-8, gt=0, description="Adam's epsilon.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay on matrices (not on norms or biases).")
    clip_norm: float | None = Field(1.0, gt=0, description="Largest norm of all gradients together; null: no clipping.")


class CheckpointSettings(Section):
    """When to save and what to keep."""

    every: int = Field(100, ge=0, description="Steps between checkpoints; 0 saves only at the end.")
    keep: PositiveInt = Field(2, description="Newest good checkpoints to keep.")
    background: bool = Field(
        True,
        description="Write checkpoints from a copy in host memory while training goes on; false: training waits.",
    )
    max_failures: PositiveInt = Field(
        3, description="Saves that may fail in a row, on a full disk for one, before the run ends."
    )


class TrainSettings(Section):
    """The training run."""

    steps: PositiveInt = Field(description="Optimizer steps.")
    global_batch: PositiveInt = Field(
        description="Groups (packed sequences) between two optimizer steps, over all replicas."
    )
    seed: int = Field(0, ge=0, description="Seeds weights and data order.")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="`auto`: fp32 on CPU; on CUDA bf16 with fp32 master weights."
    )
    optimizer: OptimizerSettings = Field(description="AdamW and its schedule.")
    checkpoint: CheckpointSettings = Field(CheckpointSettings(), description="When to save.")
    validate_every: int = Field(0, ge=0, description="Steps between validation losses; 0: never.")
    validate_batches: PositiveInt = Field(4, description="Global batches of one validation.")
    evaluate_every: int = Field(
        0, ge=0, description="Steps between evaluations, in which the model answers held-out questions; 0: never."
    )
    evaluate_questions: PositiveInt = Field(64, description="Most questions of one evaluation.")
    trace: tuple[PositiveInt, ...] = Field(
        (), description="Steps, counted from 1, whose timeline goes into the run's `trace.json` (for Perfetto)."
    )
    max_bad_steps: PositiveInt = Field(
        10, description="Steps in a row whose gradient is not finite (they change nothing) before the run ends."
    )
    watchdog_s: float = Field(
        300.0,
        ge=0,
        le=540,
        description="Seconds in which no action begins, after which the run ends and says why; below torch's own ten "
        "minutes. 0: never.",
    )
    freeze: tuple[str, ...] = Field(
        (),
        description="Parameters to keep fixed beside those of frozen units: patterns over names like "
        "`llm.layers.3.mlp.linear_fc1.weight`, with `*`, `?` and `[0-3]`. Layer 0 of a unit is its embedding.",
    )
    attention: Literal["auto", "flash_attn", "varlen", "sdpa", "reference"] = Field(
        "auto", description="Attention backend; `auto` takes the fastest that this machine has."
    )


class Recipe(Section):
    """One training run: model, data, parallelism, hardware, training."""

    name: str = Field(description="Names the run directory.", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    model: ModelSettings
    data: DataSettings
    parallel: ParallelSettings = Field(ParallelSettings())
    cluster: ClusterSettings = Field(ClusterSettings())
    train: TrainSettings
    run_dir: Path | None = Field(
        None, description="Where the run writes. Default: `runs/<name>` in the current folder."
    )
