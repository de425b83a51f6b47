"""What a family of published models consists of, and what a model that started from no folder is to it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.folder_files import IMAGE_PROCESSOR_FILE
from mmtrain.families.weight_layouts import ParameterSource

JsonFiles = Mapping[str, Mapping[str, Any]]  # content by name of the file
Settings = Mapping[str, Any]  # settings of a recipe's section by name; values may be sections of their own
PrefixChange = tuple[str, str]  # (prefix in the names that `weights` yields, prefix in a folder)
SECONDS = "{seconds}"  # in a prefix
PAD_TOKEN, TURN_START_TOKEN, TURN_END_TOKEN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MEDIA_TOKENS = {"image": "<image>", "video": "<video>", "audio": "<audio>"}
TINY_TOKENS = (PAD_TOKEN, TURN_START_TOKEN, TURN_END_TOKEN, *MEDIA_TOKENS.values())  # their ids are their places
TINY_VOCAB_SIZE = 512  # of a model; its tokenizer has at most as many tokens

TINY_EXTRACTOR = {  # of clips of at most four seconds, in preprocessor_config.json
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 40,
    "sampling_rate": 16000,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": 4,
    "padding_value": 0.0,
    "return_attention_mask": True,
}
TINY_QWEN_TOWER = {  # what the vision towers of Qwen2.5 and Qwen3 have in common
    "depth": 3,
    "hidden_size": 64,
    "intermediate_size": 160,
    "out_hidden_size": 128,
    "num_heads": 4,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


@dataclass(frozen=True)
class MediaMarkup:
    """The text of one medium of a kind, between a template and the tokenizer.

    A template writes `placeholder` for a medium, often between special tokens of its own. Before the text becomes
    tokens, the family's processor replaces it by `prefix`, the feature token once for each feature, and `suffix`.
    LLaVA and Qwen2-VL replace one token by itself; Gemma 3 writes line breaks and an end token around the features.

    InternVL writes each frame of a video apart. Then all of this is the first one, and before the features of later
    ones, which also have the suffix, comes `later_prefix` with their number in the place of `{number}`. Qwen3-VL
    writes when an item is shown: seconds, with one decimal, in the place of `{seconds}` in both prefixes. GLM-4.5V does
    so behind each item, in whole seconds. Pixtral writes each row of the features of an image apart, with `row_break`
    between two rows; the suffix follows the last one.
    """

    placeholder: str
    feature_token: str  # a special token of the tokenizer, whose place one feature takes
    prefix: str = ""
    suffix: str = ""
    later_prefix: str | None = None
    whole_seconds: bool = False
    row_break: str | None = None

    @property
    def writes_times(self) -> bool:
        """Whether the text of an item says when it is shown."""
        return SECONDS in self.expansion

    def seconds(self, tenths: int) -> str:
        """Return what is written for a time in tenths of seconds."""
        return str(tenths // 10) if self.whole_seconds else f"{tenths / 10:.1f}"

    @property
    def expansion(self) -> str:
        """Return what stands for the placeholder in text, with one feature."""
        return f"{self.prefix}{self.feature_token}{self.suffix}"

    def later_item(self, number: int, seconds: str) -> str:
        """Return what stands for one of the later items or rows of a medium, with one feature; `number` is from 1."""
        if self.row_break is not None:
            return f"{self.row_break}{self.feature_token}"
        assert self.later_prefix is not None
        prefix = self.later_prefix.replace("{number}", str(number))
        return f"{prefix}{self.feature_token}{self.suffix}".replace(SECONDS, seconds)


# By kind of media: image, video, audio. None for a kind that is written in a way which is not supported yet.
Markups = Mapping[str, MediaMarkup | None]


@dataclass(frozen=True)
class NewModel:
    """A model by its settings, and what else its config states."""

    units: Mapping[str, Mapping[str, Any]]  # settings by name of the unit, as in a recipe with none left out
    image: Mapping[str, Any]  # settings of `data.image`
    feature_tokens: Mapping[str, int]  # by modality: the token whose place a feature takes, of an image or a clip
    video_token: int | None  # likewise of a video; that of images where the tokenizer has no other
    end_ids: tuple[int, ...]  # tokens at which generation ends
    max_tokens: int  # of a sequence


@dataclass(frozen=True)
class FolderWriter:
    """How a family writes the JSON files of a new folder.

    It need not check that the model is one of the family: what its files say is read back and compared.
    """

    units: frozenset[str]  # that its models have
    files: Callable[[NewModel], JsonFiles]


@dataclass(frozen=True)
class FolderSettings:
    """What a folder says of a recipe, and which of its tensors export copies because nothing here computes them."""

    model: Mapping[str, Settings]  # by unit: shapes, which a recipe must not contradict
    data: Mapping[str, Settings] = field(default_factory=dict)  # by section of `data`: defaults of a recipe
    carried: tuple[ParameterSource, ...] = ()  # of parameters that this model does not have
    not_built: Mapping[str, str] = field(default_factory=dict)  # by modality: the key that keeps its tower from it


@dataclass(frozen=True)
class Family:
    """A family of models, as data and small functions.

    tiny: the JSON files of a tiny model by name, for `mmtrain data tiny-model`.
    image_processor: what its processor passes to that of images, whatever the folder states.
    video_processor: likewise, to that of videos, as settings of `data.video`.
    video_type: the class of its processor of videos, where a folder names none.
    spellings: a family whose tensors were renamed by a version of `transformers` lists the prefixes of each spelling;
        export writes the one that the source folder has.
    other_layout: what `weights` yields for folders whose tensors have other shapes, as another version of
        `transformers` writes them.
    markups: how its processor writes media into text, for those where that is more than the placeholder that the folder
        names, once for each feature.
    processor_markups: what holds instead in folders whose processor of videos is of a class named here.
    ignored: suffixes of tensors that may be in a folder and hold nothing to keep (buffers).
    other_blocks: likewise, by the settings of a folder: of blocks that predict further tokens, behind the others, and
        of towers that are not built.
    other_models: prefixes of the tensors of other models in its folders, which training leaves alone and export copies.
    writer: for families as which a model that started from random weights can be exported.
    """

    name: str
    architectures: tuple[str, ...]  # in `config.json`
    settings: Callable[[ConfigSection], FolderSettings]
    weights: Callable[[FolderSettings], Iterator[ParameterSource]]
    tiny: Mapping[str, Mapping[str, Any]]
    other_layout: Callable[[FolderSettings], Iterator[ParameterSource]] | None = None
    markups: Markups = field(default_factory=dict)
    processor_markups: Mapping[str, Markups] = field(default_factory=dict)
    image_processor: Mapping[str, Any] = field(default_factory=dict)
    video_processor: Settings = field(default_factory=dict)
    video_type: str = ""
    spellings: tuple[tuple[PrefixChange, ...], ...] = ((),)
    ignored: Callable[[FolderSettings], tuple[str, ...]] = lambda _: ()
    other_models: tuple[str, ...] = ()
    other_blocks: Callable[[FolderSettings], tuple[str, ...]] = lambda _: ()
    writer: FolderWriter | None = None

    @property
    def has_processor(self) -> bool:
        """Whether transformers opens its folders with a processor, which calls the tokenizer: models with media."""
        return IMAGE_PROCESSOR_FILE in self.tiny


def tiny_token_id(token: str) -> int:
    """Return the id of a special token of all tiny models."""
    return TINY_TOKENS.index(token)


def tiny_decoder(**of_family: Any) -> dict[str, Any]:
    """Return the config of a decoder that trains in minutes on one core."""
    return {
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": TINY_VOCAB_SIZE,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tiny_token_id(TURN_END_TOKEN),
        "pad_token_id": tiny_token_id(PAD_TOKEN),
        "dtype": "float32",
        **of_family,
    }
