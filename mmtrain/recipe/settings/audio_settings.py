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
    """A Whisper-shaped encoder over log-mel frames of 10 ms, with downsampling and projector.

    Two convolutions with kernel 3, the second with stride 2, then pre-norm blocks (Radford et al., arXiv 2212.04356).
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
    clip_end: Literal["zeros", "silence", "unpadded"] = setting(
        "zeros",
        affects={"lengths", "steps", "resume"},
        description="What the convolutions see behind a clip. `zeros`: nothing, and a clip is padded to whole "
        "features. `silence`: the log-mel frames of silence, as if the clip were padded to `max_frames` "
        "(Qwen2-Audio); a clip then has the tokens of its own frames, and one frame more that is only looked at. "
        "`unpadded`: nothing either, but a clip has its own frames only, of which an odd last one is a token too "
        "(Qwen2.5-Omni).",
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
        """Return the stride of the second convolution."""
        return 2

    @property
    def partial_cells(self) -> int:
        """Return the frames that may be missing in the last token of a clip."""
        return self.cells_per_token - 1 if self.clip_end == "unpadded" else 0

    @property
    def longest_clip_frames(self) -> int | None:
        """Return the frames that the positions of a clip cover; None if a clip may have any length."""
        return None if self.chunk else self.max_frames

    def frames_per_item(self, seconds: float) -> int:
        """Return the log-mel frames of about so many seconds, at whose end a chunk and a feature end.

        Only for encoders with `chunk`.
        """
        assert self.chunk is not None, "clips without chunks are not divided into items"
        unit = math.lcm(self.chunk, self.cells_per_feature)
        return max(round(seconds * LOG_MEL_FRAMES_PER_SECOND / unit), 1) * unit

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
        if self.chunk is not None and self.chunk % self.cells_per_token:
            problems.append(f"chunk {self.chunk} is odd, but the second convolution halves it")
        if self.chunk is not None and self.chunk > self.max_frames:
            problems.append(f"chunk {self.chunk} is above max_frames {self.max_frames}, which the positions cover")
        if self.chunk is not None and self.clip_end == "silence":
            problems.append(
                "clip_end silence is behind a clip, but with chunk the convolutions see one chunk; use unpadded"
            )
        problems += self._resampler_problems()
        return self._without(problems)
