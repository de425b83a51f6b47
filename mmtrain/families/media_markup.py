"""How a model family writes media into text: the seam between chat templates and families."""

from collections.abc import Mapping
from dataclasses import dataclass

SECONDS = "{seconds}"  # in a prefix


@dataclass(frozen=True)
class MediaMarkup:
    """The text of one medium of a kind, between a template and the tokenizer.

    A template writes `placeholder` for a medium, often between special tokens of its own. Before the text becomes
    tokens, the family's processor replaces it by `prefix`, the feature token once for each feature, and `suffix`.
    LLaVA and Qwen2-VL replace one token by itself; Gemma 3 writes line breaks and an end token around the features.

    InternVL writes each frame of a video apart. Then all of this is the first one, and before the features of later
    ones, which also have the suffix, comes `later_prefix` with their number in the place of `{number}`. Qwen3-VL
    writes when an item is shown: seconds, with one decimal, in the place of `{seconds}` in both prefixes.
    """

    placeholder: str
    feature_token: str  # a special token of the tokenizer, whose place one feature takes
    prefix: str = ""
    suffix: str = ""
    later_prefix: str | None = None

    @property
    def writes_times(self) -> bool:
        """Whether the text of an item says when it is shown."""
        return SECONDS in self.prefix

    @property
    def expansion(self) -> str:
        """Return what stands for the placeholder in text, with one feature."""
        return f"{self.prefix}{self.feature_token}{self.suffix}"

    def later_item(self, number: int, seconds: str) -> str:
        """Return what stands for one of the later items of a medium, with one feature; `number` counts from 1."""
        assert self.later_prefix is not None
        prefix = self.later_prefix.replace("{number}", str(number)).replace(SECONDS, seconds)
        return f"{prefix}{self.feature_token}{self.suffix}"


# By kind of media: image, video, audio. None for a kind that is written in a way which is not supported yet.
Markups = Mapping[str, MediaMarkup | None]
