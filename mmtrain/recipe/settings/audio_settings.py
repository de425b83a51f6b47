"""The settings of an audio encoder."""

import math
from typing import Literal

from pydantic import model_validator

from mmtrain.recipe.settings.base import NOTHING, PositiveInt, setting
from mmtrain.recipe.settings.encoder_settings import MODALITY_DESCRIPTION, EncoderSettings
from mmtrain.recipe.settings.presets import AudioPreset
from mmtrain.recipe.settings.unit_settings import PRESET_DESCRIPTION

LOG_MEL_FRAMES_PER_SECOND = 100  # one frame every 10 ms, as in Whisper


class AudioSettings(EncoderSettings):
    """An encoder over log-mel frames of 10 ms, with downsampling and projector.

    Two convolutions with kernel 3, the second with stride 2, then pre-norm blocks (Radford et al., arXiv 2212.04356).
    Qwen3-Omni (arXiv 2509.17765) has three over time and mel bands in their place.
    """

    modality: Literal["audio"] = setting("audio", affects=NOTHING, description=MODALITY_DESCRIPTION)
    preset: AudioPreset | None = setting(None, affects={"steps", "resume"}, description=PRESET_DESCRIPTION)
    mel_bins: PositiveInt = setting(
        80, affects={"plan", "steps", "resume"}, description="Mel bands of a frame (Whisper: 80, large-v3: 128)."
    )
    activation: Literal["gelu", "gelu_tanh"] = setting(
        "gelu", affects={"plan", "steps", "resume"}, description="Activation of the convolutions and the MLP."
    )
    norm_eps: float = setting(
        1e-5, gt=0, affects={"plan", "steps", "resume"}, description="Epsilon of the layer norms."
    )
    key_bias: bool = setting(
        True,
        affects={"plan", "steps", "resume"},
        description="Bias in the key projection, beside those of queries and values. Whisper has none.",
    )
    conv_channels: PositiveInt | None = setting(
        None,
        affects={"plan", "lengths", "steps", "resume"},
        added_later=True,
        description="Channels of three convolutions over time and mel bands, with kernel 3 x 3 and stride 2, which "
        "compute each chunk by itself: 8 log-mel frames become one token (Qwen3-Omni: 480). Needs `chunk`. Default: "
        "two convolutions over time, of which 2 log-mel frames become one token (Whisper).",
    )
    positions: Literal["sinusoidal", "learned", "fixed"] = setting(
        "sinusoidal",
        affects={"plan", "steps", "resume"},
        description="Position embeddings. `sinusoidal`: computed, as in Whisper. `learned`: one vector for each "
        "position. `fixed`: the same, but they never train (Whisper and Qwen2-Audio in `transformers`, whose folders "
        "store the sinusoids).",
    )
    max_frames: PositiveInt = setting(
        3000,
        affects={"plan", "steps", "resume"},
        description="Longest clip in log-mel frames of 10 ms that the positions cover. Even; 3000 frames are 30 s. "
        "With `chunk` it is the longest chunk, and clips may have any length.",
    )
    chunk: PositiveInt | None = setting(
        None,
        affects={"plan", "steps", "resume"},
        description="Log-mel frames of the chunks into which a clip is cut: convolutions and attention see one chunk, "
        "in which positions start at 0 (Qwen2.5-Omni: 200). Even. Default: a clip is not cut.",
    )
    window_chunks: PositiveInt = setting(
        1,
        affects={"plan", "lengths", "steps", "resume"},
        added_later=True,
        description="With `conv_channels`: neighboring chunks of a clip that attend to each other (Qwen3-Omni: 8).",
    )
    clip_end: Literal["zeros", "silence", "unpadded", "mirrored"] = setting(
        "zeros",
        affects={"lengths", "steps", "resume"},
        description="What the convolutions see behind a clip. `zeros`: nothing, and a clip is padded to whole "
        "features. `silence`: the log-mel frames of silence, as if the clip were padded to `max_frames` "
        "(Qwen2-Audio); a clip then has the tokens of its own frames, and one frame more that is only looked at. "
        "`unpadded`: nothing either, but a clip has its own frames only, of which an odd last one is a token too "
        "(Qwen2.5-Omni). `mirrored`: likewise, for clips that their extractor does not pad either: behind its last "
        "sample a clip is mirrored, and samples that fill no frame are left out (Qwen3-Omni).",
    )
    downsample: PositiveInt = setting(
        1,
        affects={"plan", "lengths", "steps", "resume"},
        description="Neighboring outputs of 20 ms that are merged into one LLM token.",
    )
    pooling: Literal["join", "mean"] = setting(
        "join",
        affects={"plan", "steps", "resume"},
        description="How `downsample` outputs become one. `join`: side by side, after the last norm. `mean`: their "
        "average, before the last norm (Qwen2-Audio).",
    )

    @property
    def pools(self) -> bool:
        """Return whether the features are averages of tokens."""
        return self.pooling == "mean"

    @property
    def pools_before_norm(self) -> bool:
        """Return whether the features are averages."""
        return self.pools

    @property
    def cell_features(self) -> int:
        """Return the mel bands of a log-mel frame."""
        return self.mel_bins

    @property
    def cells_per_token(self) -> int:
        """Return the stride of all convolutions together."""
        return 2 if self.conv_channels is None else 8

    @property
    def partial_cells(self) -> int:
        """Return the frames that may be missing in the last token of a clip."""
        return self.cells_per_token - 1 if self.clip_end in ("unpadded", "mirrored") else 0

    @property
    def chunk_tokens(self) -> int:
        """Return the tokens of a whole chunk, the last of which may have fewer frames; 0 if clips are not cut."""
        return math.ceil((self.chunk or 0) / self.cells_per_token)

    @property
    def chunk_cells(self) -> int:
        """Return the cells of a whole chunk: its frames, and zeros up to a whole token."""
        return self.chunk_tokens * self.cells_per_token

    def count_cells(self, frames: int) -> int:
        """Return the cells in which the frames of a clip lie: its frames, and zeros behind some of them.

        With `conv_channels`, each whole chunk lies in `chunk_cells`. What remains behind it is filled up to whole
        tokens, so that convolutions see zeros there. A clip of less than one chunk ends with its last frame.
        """
        if self.conv_channels is None:
            return frames
        assert self.chunk is not None
        num_whole, rest = divmod(frames, self.chunk)
        if num_whole == 0:
            return rest
        return num_whole * self.chunk_cells + math.ceil(rest / self.cells_per_token) * self.cells_per_token

    @property
    def longest_clip_frames(self) -> int | None:
        """Return the frames that the positions of a clip cover; None if a clip may have any length."""
        return None if self.chunk else self.max_frames

    def cells_per_item(self, seconds: float) -> int:
        """Return the cells of about so many seconds, at whose end attention and a feature end.

        Only for encoders with `chunk`.
        """
        assert self.chunk is not None, "clips without chunks are not divided into items"
        frames = self.chunk * self.window_chunks
        if self.conv_channels is None:
            frames = math.lcm(frames, self.cells_per_feature)
        return max(round(seconds * LOG_MEL_FRAMES_PER_SECOND / frames), 1) * self.count_cells(frames)

    @property
    def tokens_per_feature(self) -> int:
        """Return the neighboring tokens that the projector merges."""
        return self.downsample

    @model_validator(mode="after")
    def _consistent(self) -> "AudioSettings":
        problems = []
        if self.hidden % self.heads:
            problems.append(f"hidden {self.hidden} is not divisible by heads {self.heads}")
        if self.positions == "sinusoidal" and self.hidden % 2:
            problems.append(f"hidden {self.hidden} is odd, but sinusoidal positions are pairs of sine and cosine")
        if self.max_frames % 2:
            problems.append(f"max_frames {self.max_frames} is odd, but the second convolution halves it")
        if self.conv_channels is None and self.chunk is not None and self.chunk % self.cells_per_token:
            problems.append(f"chunk {self.chunk} is odd, but the second convolution halves it")
        if self.chunk is not None and self.chunk > self.max_frames:
            problems.append(f"chunk {self.chunk} is above max_frames {self.max_frames}, which the positions cover")
        if self.chunk is not None and self.clip_end == "silence":
            problems.append(
                "clip_end silence is behind a clip, but with chunk the convolutions see one chunk; use unpadded"
            )
        problems += self._convolution_problems()
        problems += self._resampler_problems()
        return self._without(problems)

    def _convolution_problems(self) -> list[str]:
        """Say what does not fit convolutions over time and mel bands."""
        if self.conv_channels is None:
            return ["window_chunks needs conv_channels"] if self.window_chunks > 1 else []
        allowed = {"positions": ("sinusoidal",), "clip_end": ("unpadded", "mirrored"), "downsample": (1,)}
        problems = [] if self.chunk is not None else ["conv_channels needs chunk"]
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                options = " or ".join(map(str, values))
                problems.append(f"{name} is {getattr(self, name)}, with conv_channels allowed: {options}")
        return problems
