"""Settings of a recipe's `data`: what to train on, and how samples become tokens and microbatches."""

from math import isqrt
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from mmtrain.plugins import installed_plugins
from mmtrain.recipe.settings.base import NOTHING, PositiveFloat, PositiveInt, Section, setting
from mmtrain.recipe.settings.source_columns import Columns
from mmtrain.recipe.settings.source_path import SourcePath
from mmtrain.recipe.settings.text_settings import SpecialTokenSettings, ThoughtSettings

Share = Annotated[float, Field(ge=0, le=1)]
StepNumber = Annotated[int, Field(ge=0)]
DataPart = Literal["train", "validation"]


def share_schedule(value: object) -> dict[int, float] | None:
    """Turn a constant share into a schedule that starts at step 0, and keys of a mapping into steps.

    The type's own messages would name the place of a share inside of a schedule that nobody wrote. Raises ValueError.
    """
    if value is None:
        return None
    schedule: dict[Any, Any] = value if isinstance(value, dict) else {0: value}
    if wrong := [key for key in schedule if not str(key).isdecimal()]:
        raise ValueError(f"found the key {wrong[0]!r}, allowed: steps, which are whole numbers from 0")
    for share in schedule.values():
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            allowed = "a number from 0 to 1, or one for each step as {0: 0.7, 10000: 0.3}"
            raise ValueError(f"found {share!r}, allowed: {allowed}")
    return {int(step): share for step, share in schedule.items()}


ShareSchedule = Annotated[
    dict[StepNumber, Share] | None,
    BeforeValidator(share_schedule, json_schema_input_type=Share | dict[StepNumber, Share] | None),
]


FORMATS = ("llava", "messages", "webdataset", "parquet", "lengths")


def _known_format(name: str) -> str:
    """Return the name of a format. Raises ValueError for one that is neither ours nor that of a plug-in."""
    if name in FORMATS or ":" in name or name in (plugins := installed_plugins("formats")):
        return name
    raise ValueError(f"found {name!r}; allowed: {', '.join((*FORMATS, *plugins))}, or a plug-in as module:function")


# The schema lists our own, so that editors suggest them.
_FORMAT_SCHEMA = {"anyOf": [{"enum": list(FORMATS)}, {"type": "string"}]}
SourceFormat = Annotated[str, AfterValidator(_known_format), WithJsonSchema(_FORMAT_SCHEMA)]


class SourceSettings(Section):
    """Samples of one format, in one file or several."""

    path: SourcePath = setting(
        affects={"plan", "lengths"},
        description="A file of samples, a folder of such files, or several files as `train-{000..123}.tar`, "
        "`{a,b}.json` or `*.parquet`; or a URL of these (`https://`, `s3://`, `gs://`, `hf://`), in which folders end "
        "with `/`; or a split of a data set of the hub, `hf://datasets/org/name?split=train`; or a metadataset of "
        "Energon (`.yaml`). Relative paths start at the recipe's folder.",
    )
    format: SourceFormat | None = setting(
        None,
        affects={"plan", "lengths"},
        description="`llava`: JSON or JSONL with `conversations`. `messages`: JSON or JSONL with `messages` (ShareGPT, "
        "OpenAI). `webdataset`: tar shards. `parquet`: Parquet files. `lengths`: a CSV file of lengths without "
        "samples, to plan with. Others are plug-ins: a name in the group `mmtrain.formats`, or `module:function`. "
        "Default: from the file's suffix; for JSON from the keys of each entry.",
    )
    image_root: SourcePath | None = setting(
        None,
        affects={"plan", "lengths"},
        description="Folder, or its URL, where relative paths of images, clips and videos start. Media must lie inside "
        "it. Default: the folder of the data file.",
    )
    columns: Columns = setting(
        {},
        affects={"plan", "lengths"},
        added_later=True,
        description="Where the samples of this source have what mmtrain's keys mean, if they call it otherwise: "
        "`{messages: data.turns, images: pictures}`. Paths lead into objects, and by numbers into lists.",
    )
    weight: float = setting(
        1.0,
        gt=0,
        le=10_000,
        affects={"plan"},
        description="How often an epoch uses each sample of this source; 2 means twice.",
    )
    max_samples: PositiveInt | None = setting(
        None,
        affects={"plan", "lengths"},
        added_later=True,
        description="Only the first so many samples of this source are read, those that cannot be used among them. "
        "Default: all.",
    )
    share: ShareSchedule = setting(
        None,
        affects={"plan"},
        description="Share of training that this source makes up, from 0 to 1, in `data.share_unit`. `{0: 0.7, 10000: "
        "0.3}` changes it with the 10,001st step. All sources have shares, which add up to 1, or none has. With shares "
        "`weight` has no meaning: each source is passed through at its own pace.",
    )
    split: str | None = setting(
        None,
        affects={"plan", "lengths"},
        description="Which split of a folder of Energon (`.nv-meta`) or of the `datasets` library to use. Default: "
        "`train` of Energon; a folder of several splits of `datasets` needs it.",
    )
    unmarked_media: Literal["reject", "front"] = setting(
        "reject",
        affects={"plan", "lengths"},
        description="What becomes of samples whose user turns hold no mark (`<image>`) for their images, clips or "
        "videos. `reject`: they are quarantined. `front`: the media come in front of the first user turn. Samples with "
        "some marks, but too few or too many, are quarantined in any case.",
    )

    captions: Literal["describe", "draw"] = setting(
        "describe",
        affects={"plan", "lengths"},
        description="What is learned from pairs of images and a caption. `describe`: the assistant writes the caption. "
        "`draw`: the user writes it, and the assistant draws the images; every sample of the source must then be one "
        "user turn that shows images, and an answer in words, which is the caption. Name a source twice to learn both.",
    )
    documents: Literal["draw", "show"] = setting(
        "draw",
        affects={"plan", "lengths"},
        description="What becomes of the images of documents whose texts and images take turns. `draw`: the assistant "
        "draws them. `show`: the user shows them, for models without a generator too; the assistant writes the texts. "
        "Name a source twice to learn both.",
    )

    @property
    def states_lengths(self) -> bool:
        """Return whether the source holds lengths only, without samples."""
        return is_lengths_source(self.path, self.format)


def is_lengths_source(path: SourcePath, format: str | None) -> bool:
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
    max_reading_bytes: Annotated[int, Field(ge=1 << 28)] = setting(
        4 << 30,
        affects={"plan", "lengths"},
        added_later=True,
        description="Most memory that reading sources may take besides the index itself, in bytes. A file that takes "
        "more is named, and its samples are quarantined. Row groups of Parquet files of several GB need more.",
    )
    redirect_hosts: tuple[Annotated[str, Field(pattern=r"^(\*\.)?[A-Za-z0-9.:_-]+$")], ...] = setting(
        (),
        affects=NOTHING,
        added_later=True,
        description="Hosts that a server of remote files may redirect to, besides those of the sources: "
        "`cdn.example.com`, or `*.example.com` for all below it. They get none of the headers that were set for the "
        "server.",
    )


class ImageSettings(Section):
    """How an image becomes patches."""

    scheme: Literal["native", "tiles", "pinpoints", "fixed"] = setting(
        "native",
        affects={"plan", "lengths", "steps", "resume"},
        description="`native` (Qwen2-VL): keep the aspect ratio, scale the area into [`min_pixels`, `max_pixels`], and "
        "round the sides to multiples of merged patches. `tiles` (InternVL): cut the image into up to `max_tiles` "
        "squares of `tile` pixels, on the canvas with the closest aspect ratio; if there are several, one more square "
        "shows the entire image. `pinpoints` (LLaVA-NeXT): one square shows the entire image; then, without a change "
        "of its aspect ratio, put it on the canvas of `pinpoints` that shows it largest and wastes least, with black "
        "borders, and cut that into squares of `tile` pixels. `fixed`: bring it to `size` x `size`, as `fit` says.",
    )
    tile: PositiveInt = setting(
        448,
        affects={"plan", "lengths", "steps", "resume"},
        description="Side of one tile in pixels, for `tiles` and `pinpoints`.",
    )
    pinpoints: tuple[tuple[PositiveInt, PositiveInt], ...] = setting(
        (),
        affects={"plan", "lengths", "steps", "resume"},
        description="Canvases as [height, width] in pixels, multiples of `tile`, for `pinpoints`.",
    )
    tile_several: bool = setting(
        True,
        affects={"plan", "lengths", "steps", "resume"},
        description="Whether images that share a sample with others are cut into tiles too, for `pinpoints`. Otherwise "
        "each of them becomes one square, with borders in the color `mean` (LLaVA-OneVision).",
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
        description="How an image that is no square becomes one, for `fixed`. `stretch` (SigLIP): change its aspect "
        "ratio. `crop` (CLIP): cut out its middle. `pad` (LLaVA): add borders in the color `mean`.",
    )
    resample: Literal["bilinear", "bicubic", "lanczos"] = setting(
        "bicubic",
        affects={"plan", "steps", "resume"},
        description="Filter that resizes images and frames.",
    )
    decode: Literal["scaled", "full"] = setting(
        "scaled",
        affects={"plan", "steps", "resume"},
        description="How a JPEG is read that is much larger than needed. `scaled`: at 1/2, 1/4 or 1/8 of its size, "
        "several times faster. `full`: all its pixels, as the processors of published models do.",
    )
    partial_patches: Literal["reject", "drop"] = setting(
        "reject",
        affects={"plan", "lengths", "steps", "resume"},
        description="Pixels at the right and lower edges that fill no patch, but for `native`. `reject`: the "
        "side must be a multiple of merged patches. `drop`: leave them out, as published models do whose sides are "
        "not (SigLIP: 384 pixels, patches of 14).",
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
    pixel_limits: Literal["image", "frames", "sides", "area"] = setting(
        "image",
        affects={"plan", "lengths", "steps", "resume"},
        added_later=True,
        description="What `min_pixels` and `max_pixels` limit, for `native`: `image`, the area of an image, or "
        "`frames`, the area times `model.vision.temporal_patch`, as of the frames that a patch joins. With `frames` an "
        "image smaller than a merged patch is first enlarged without a change of its aspect ratio (GLM-4.5V). `sides`: "
        "an image must fit into a square of `max_pixels`, is never enlarged, and its sides are rounded up to merged "
        "patches; `min_pixels` has no effect (Pixtral). `area`: every image, a small one too, is brought to as many "
        "whole merged patches as `max_pixels` has, without a change of its aspect ratio but for them; `min_pixels` has "
        "no effect (Gemma 4).",
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
        if self.scheme == "pinpoints" and not self.pinpoints:
            problems.append("pinpoints is empty, but images of scheme `pinpoints` need canvases")
        if self.scheme != "pinpoints" and not self.tile_several:
            problems.append("tile_several is false; allowed with scheme pinpoints")
        if self.pixel_limits == "sides" and isqrt(self.max_pixels) ** 2 != self.max_pixels:
            problems.append(
                f"max_pixels is {self.max_pixels}; allowed with pixel_limits `sides`: squares, like "
                f"{isqrt(self.max_pixels) ** 2}"
            )
        uneven = [canvas for canvas in self.pinpoints if canvas[0] % self.tile or canvas[1] % self.tile]
        if self.scheme == "pinpoints" and uneven:
            problems.append(f"pinpoints holds {list(uneven[0])}; allowed: multiples of tile {self.tile}")
        return self._without(problems)


class VideoSettings(Section):
    """How a video becomes images."""

    max_frames: PositiveInt = setting(
        8,
        affects={"plan", "lengths", "steps", "resume"},
        description="Most frames taken from a video, evenly spaced. Each becomes one image (one tile with tiles).",
    )
    fps: PositiveFloat | None = setting(
        None,
        affects={"plan", "lengths", "steps", "resume"},
        description="Frames taken from each second of a video, at most `max_frames` in all (Qwen2-VL). They are "
        "rounded down to whole patches of `model.vision.temporal_patch` frames with `sampling: parts`. Default: "
        "`max_frames`, however long it is.",
    )
    sampling: Literal["parts", "middles", "ends", "seconds", "by_length"] = setting(
        "parts",
        affects={"plan", "lengths", "steps", "resume"},
        description="`parts`: a video is divided into equal parts, of which each shows its first frame (Qwen2-VL, "
        "LLaVA-OneVision). `middles`: each shows the one in its middle (InternVL). `ends`: frames are evenly spaced "
        "from the first to the last one (Qwen3-VL). `seconds`: those on show at every 1 / `fps` of a second from the "
        "start, as many as an even number of frames; if these are more than `max_frames`, as many at evenly spaced "
        "times (GLM-4.5V). `by_length`: as many that a patch of frames lasts 1/3 s in videos of up to 30 s, 1 s in "
        "those of up to 300 s, and 2 s in longer ones, at most `max_frames`; `fps` stays unset (GLM-4.6V).",
    )
    pixel_limits: Literal["frame", "video"] = setting(
        "frame",
        affects={"plan", "lengths", "steps", "resume"},
        description="What `min_pixels` and `max_pixels` limit: `frame`, each frame, or `video`, all frames of a video "
        "together (Qwen3-VL).",
    )
    min_frames: PositiveInt = setting(
        1,
        affects={"plan", "lengths", "steps", "resume"},
        description="Fewest frames taken from a video that has as many, with `fps`.",
    )
    max_seconds: PositiveFloat | None = setting(
        None,
        affects={"plan", "lengths", "steps", "resume"},
        description="Longest video in seconds. `long_clips` says what becomes of longer ones. Default: any length.",
    )
    long_clips: Literal["reject", "cut"] = setting(
        "reject",
        affects={"plan", "lengths", "steps", "resume"},
        description="`reject`: samples with a video that is longer than `max_seconds` are quarantined. `cut`: frames "
        "are taken from its first `max_seconds` only.",
    )
    min_pixels: PositiveInt | None = setting(
        None,
        affects={"plan", "lengths", "steps", "resume"},
        description="Smallest area of a frame, or of all frames, in pixels, for `native`. Default: "
        "data.image.min_pixels.",
    )
    max_pixels: PositiveInt | None = setting(
        None,
        affects={"plan", "lengths", "steps", "resume"},
        description="Largest area of a frame, or of all frames, in pixels, for `native`. Default: "
        "data.image.max_pixels.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> "VideoSettings":
        problems = []
        if self.min_frames > self.max_frames:
            problems.append(f"min_frames {self.min_frames} is above max_frames {self.max_frames}")
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            problems.append(f"min_pixels {self.min_pixels} is above max_pixels {self.max_pixels}")
        if self.sampling in ("seconds", "by_length") and self.min_frames > 1:
            problems.append(
                f"min_frames is {self.min_frames}; allowed with sampling `{self.sampling}`: 1, leave it out"
            )
        if self.sampling == "by_length" and self.fps is not None:
            problems.append(f"fps is {self.fps:g}, but sampling `by_length` has rates of its own; set it to null")
        return self._without(problems)

    @property
    def states_times(self) -> bool:
        """Return whether it is known when the items of a video are shown."""
        return self.sampling in ("ends", "seconds", "by_length")


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
        description="Longest clip in seconds. `long_clips` says what becomes of longer ones.",
    )
    long_clips: Literal["reject", "cut"] = setting(
        "reject",
        affects={"plan", "lengths", "steps", "resume"},
        description="`reject`: samples with a clip that is longer than `max_seconds` are quarantined. `cut`: only the "
        "first `max_seconds` of such a clip are heard, as the processors of Qwen2-Audio and Qwen2.5-Omni do. Default: "
        "`cut` for a model folder with a feature extractor.",
    )
    item_seconds: float | None = setting(
        None,
        gt=0,
        affects={"plan", "lengths", "steps", "resume"},
        description="For an encoder that hears clips in chunks (`model.audio.chunk`): a clip becomes items of about so "
        "many seconds, which several ranks may encode, as they do the frames of a video. The features are the same. "
        "An item ends where a chunk and a feature end. Default: a clip is one item; 30 for folders of Qwen2.5-Omni.",
    )


class IsfSettings(Section):
    """How iterative sampling and filtering fills groups (OmniBal, arXiv 2407.20761)."""

    token_budget: Literal["seq_len", "longest"] = setting(
        "seq_len",
        affects={"plan", "steps", "resume"},
        description="Most LLM tokens of a group: `seq_len`, or the length of the `longest` sample of the data, as "
        "published.",
    )
    encoder_budget: Literal["tokens", "items"] = setting(
        "tokens",
        affects={"plan", "steps", "resume"},
        description="What bounds an encoder in a group: its `tokens`, or its `items` (images, clips) as published, for "
        "items of one size. Both in proportion to the LLM's budget.",
    )
    rounds: int = setting(
        10,
        ge=1,
        le=1000,
        affects={"plan", "steps", "resume"},
        description="How often samples of groups that are not full are shuffled and grouped again.",
    )
    slack: float = setting(
        1 / 32,
        ge=0,
        lt=1,
        affects={"plan", "steps", "resume"},
        description="Fraction of the LLM's budget that a full group may lack. Published: 128 of 4096 tokens.",
    )
    encoder_slack: float | None = setting(
        None,
        ge=0,
        lt=1,
        affects={"plan", "steps", "resume"},
        description="Fraction of an encoder's budget that a full group may lack. Published: 0, which images of many "
        "sizes never reach. Default: that of `slack`.",
    )
    remainder: Literal["keep", "next_epoch"] = setting(
        "keep",
        affects={"plan", "steps", "resume"},
        description="Samples that no full group holds after all rounds: `keep` groups them as they come, so that an "
        "epoch uses every sample; `next_epoch` leaves them out until the next epoch shuffles all samples again.",
    )


class DataSettings(Section):
    """What to train on, and how samples become microbatches."""

    sources: Annotated[tuple[SourceSettings, ...], Field(min_length=1)] = Field(description="Training samples.")
    validation: tuple[SourceSettings, ...] = setting(
        (), affects=NOTHING, description="Held-out samples for the validation loss and for `mmtrain evaluate`."
    )
    validation_fraction: float | None = setting(
        None,
        gt=0,
        lt=1,
        affects={"plan", "lengths", "steps", "resume"},
        added_later=True,
        description="Fraction of the samples of `sources` that is held out for the validation loss and for `mmtrain "
        "evaluate`, in place of `validation`. A hash of each sample decides, which is the same on every machine. "
        "Default: all samples of `sources` train.",
    )
    share_unit: Literal["tokens", "samples"] = setting(
        "tokens",
        affects={"plan", "steps", "resume"},
        description="What a source's `share` is a share of: LLM tokens, or samples.",
    )
    tokenizer: Path | None = setting(
        None,
        affects={"plan"},
        description="A folder of a Hugging Face model with `tokenizer.json` and a chat template, or a JSON file of the "
        "`tokenizers` library with the special tokens of mmtrain's own chat format. Relative paths start at the "
        "recipe's folder. Default: the folder of `model.hf`, if it has a tokenizer. Required unless all sources hold "
        "lengths only.",
    )
    special_tokens: SpecialTokenSettings = Field(
        SpecialTokenSettings(), description="Which special tokens of a model's tokenizer texts of samples may spell."
    )
    thoughts: ThoughtSettings = Field(
        ThoughtSettings(), description="What becomes of thoughts in front of answers, with a model's chat template."
    )
    seq_len: PositiveInt | Literal["auto"] = setting(
        affects={"plan", "lengths", "steps", "resume"},
        description="Most LLM tokens of one group. A group is one packed sequence and one LLM microbatch. `auto`: the "
        "planner chooses it; needs `max_sample_tokens`, and a `train.global_batch` in samples or tokens.",
    )
    max_sample_tokens: PositiveInt | None = setting(
        None,
        affects={"plan", "lengths", "steps"},
        description="Most LLM tokens of one sample; `too_long` says what becomes of longer ones. Default: `seq_len`. "
        "Required with `seq_len: auto`.",
    )
    too_long: Literal["reject", "cut"] = setting(
        "reject",
        affects={"plan", "lengths", "steps", "resume"},
        added_later=True,
        description="What becomes of samples of more LLM tokens than that. `reject`: they are quarantined. `cut`: "
        "their first tokens train, without an end of the answer that is cut. A medium that would be cut is left out, "
        "with all that follows. `mmtrain evaluate` does not ask such samples.",
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
        description="How samples become groups. `matched`: chance decides which samples share a step, and a search "
        "makes full groups of them, which are alike where they run at the same time. `isf`: iterative sampling and "
        "filtering from a shuffle (OmniBal). The others are baselines with as many samples in a "
        "group as fill it on average, fewer if they do not fit: `random`; `length`: samples "
        "of similar length share a group; `device`: similar lengths across data-parallel ranks.",
    )
    budgets: dict[str, PositiveInt] = setting(
        {},
        affects={"plan", "steps", "resume"},
        description="Most tokens of an encoder, or of the generator, in one group, by unit (`vision: 4096`). A sample "
        "above a budget shares its group with no other sample that uses this unit. Default: no limit; for `isf` in "
        "proportion to `seq_len`.",
    )
    pad: bool = setting(
        False,
        affects={"plan", "steps", "resume"},
        description="Pad the LLM tokens of each sample to the longest of its group, which then has at most `seq_len` "
        "with padding: a baseline for `grouping: random`, `length` or `device`. Padding costs time and memory and "
        "changes no loss.",
    )
    isf: IsfSettings = Field(IsfSettings(), description="How `grouping: isf` fills groups.")
    reorder: bool = setting(
        True,
        affects={"plan"},
        description="Arrange the samples and microbatches of a step for the plan, so that replicas and pipeline stages "
        "wait little (MMScale). `false`: groups go to replicas and microbatches as they come. Steps hold the same "
        "samples either way.",
    )
    long_sample_tokens: PositiveInt | None = setting(
        None,
        affects={"plan", "steps", "resume"},
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
        description="Samples among which grouping may choose. No sample moves further from its shuffled position.",
    )
    limits: LimitSettings = Field(LimitSettings(), description="Limits on what an archive may demand.")
    max_bad_rate: float = setting(
        0.01, ge=0, le=1, affects=NOTHING, description="Fraction of quarantined samples above which the run stops."
    )
    storage_patience_s: float = setting(
        3600.0,
        ge=0,
        le=604800,
        affects=NOTHING,
        added_later=True,
        description="Seconds to wait for storage that is away: a file server or object store that does not answer, or "
        "a folder that is not mounted. Nothing is quarantined meanwhile, and no watchdog ends the run. A single file "
        "that cannot be read while others of its source can is not waited for. 0: do not wait.",
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

    def sources_of(self, part: DataPart) -> tuple[SourceSettings, ...]:
        """Return the sources that hold the samples of a part; see `held_out_sources`."""
        return self.sources if part == "train" else self.held_out_sources

    @property
    def held_out_setting(self) -> str:
        """Return which setting holds samples out, for messages."""
        return "data.validation" if self.validation_fraction is None else "data.validation_fraction"

    @property
    def held_out_sources(self) -> tuple[SourceSettings, ...]:
        """Return the sources of held-out samples; none where nothing is held out.

        With `validation_fraction` they are those of training, of which a part is held out. Each sample is used once.
        """
        if self.validation_fraction is None:
            return self.validation
        once = {"share": None, "weight": 1.0}
        return tuple(source.model_copy(update=once) for source in self.sources)

    @property
    def tokenizer_path(self) -> Path:
        """Return the tokenizer of a recipe that has samples: a file, or a folder with a chat template."""
        assert self.tokenizer is not None, "`cross_checks` rejects recipes that have samples and no tokenizer"
        return self.tokenizer

    @property
    def group_tokens(self) -> int:
        """Return the most LLM tokens of a group. Where the planner chooses them, they come by `Recipe.with_groups`."""
        assert self.seq_len != "auto", "the planner has not chosen the size of groups yet"
        return self.seq_len

    @property
    def sample_tokens(self) -> int:
        """Return the most LLM tokens of a sample; longer ones are quarantined."""
        sizes = [size for size in (self.max_sample_tokens, self.seq_len) if size is not None and size != "auto"]
        return min(sizes)
