"""The settings of a vision encoder."""

from math import sqrt
from typing import Literal

from pydantic import model_validator

from mmtrain.recipe.settings.base import NOTHING, PositiveFloat, PositiveInt, setting
from mmtrain.recipe.settings.encoder_settings import MODALITY_DESCRIPTION, Activation, EncoderSettings
from mmtrain.recipe.settings.presets import VisionPreset
from mmtrain.recipe.settings.unit_settings import PRESET_DESCRIPTION

_MIN_SHRINKAGE = 1.1  # of a side of a joined picture (`transformers`)


class VisionSettings(EncoderSettings):
    """A vision transformer over image patches, with downsampling and projector."""

    modality: Literal["vision"] = setting("vision", affects=NOTHING, description=MODALITY_DESCRIPTION)
    preset: VisionPreset | None = setting(None, affects={"steps", "resume"}, description=PRESET_DESCRIPTION)
    patch: PositiveInt = setting(
        14, affects={"plan", "lengths", "steps", "resume"}, description="Side of a square patch in pixels."
    )
    temporal_patch: PositiveInt = setting(
        1,
        affects={"plan", "lengths", "steps", "resume"},
        description="Frames of a video that one patch joins (Qwen2-VL: 2). An image is a video that stands still.",
    )
    time_positions_per_second: PositiveFloat | None = setting(
        None,
        affects={"lengths", "steps", "resume"},
        description="Rotary positions in time that a second of a video takes in an LLM with `rope_sections` "
        "(Qwen2.5-VL). Default: one for each patch in time.",
    )
    patch_seconds: Literal["sampled", "stated", "stated_exactly"] = setting(
        "sampled",
        affects={"lengths", "steps", "resume"},
        description="How long a patch of a video is for `time_positions_per_second`. `sampled`: as the frames that "
        "were taken are apart. `stated`: `temporal_patch` / `data.video.fps`, also if a video has fewer or more frames "
        "a second (Qwen2.5-Omni). `stated_exactly`: likewise, and positions are not rounded, so that they must be "
        "whole numbers (Qwen3-Omni).",
    )
    activation: Activation = setting("gelu", affects={"plan", "steps", "resume"}, description="Activation of the MLP.")
    gated_mlp: bool = setting(
        False,
        affects={"plan", "steps", "resume"},
        description="Gate the MLP by the activation of a second input projection (SwiGLU with `silu`; Qwen2.5-VL).",
    )
    norm: Literal["layer", "rms"] = setting(
        "layer",
        affects={"plan", "steps", "resume"},
        description="Kind of all norms of the encoder and its projector. `layer`: layer norms. `rms`: RMS norms.",
    )
    norm_eps: float = setting(
        1e-6, gt=0, affects={"plan", "steps", "resume"}, description="Epsilon of the layer norms."
    )
    qkv_bias: bool = setting(
        True, affects={"plan", "steps", "resume"}, description="Bias in the query, key and value projections."
    )
    qk_norm: bool = setting(
        False,
        affects={"plan", "steps", "resume"},
        description="Apply an RMS norm to the queries of all heads together, and one to the keys (InternViT-6B).",
    )
    head_norms: bool = setting(
        False,
        affects={"plan", "steps", "resume"},
        added_later=True,
        description="Apply an RMS norm to each head of the queries, of the keys and, without weights, of the values. "
        "Scores are then not divided by the square root of a head's width (Gemma 4).",
    )
    post_norms: bool = setting(
        False,
        affects={"plan", "steps", "resume"},
        added_later=True,
        description="Apply a norm to what attention and MLP add to the residual stream, as `llm.post_norms` does "
        "(Gemma 4).",
    )
    layer_scale: bool = setting(
        False,
        affects={"plan", "steps", "resume"},
        description="Multiply what attention and MLP add to the residual stream by a learned vector each (InternViT).",
    )
    linear_bias: bool = setting(
        True,
        affects={"plan", "steps", "resume"},
        added_later=True,
        description="Bias in the output projections of attention and in the MLPs of blocks. GLM-4.5V has none.",
    )
    patch_bias: bool = setting(True, affects={"plan", "steps", "resume"}, description="Bias in the patch embedding.")
    patch_order: Literal["colors", "pixels"] = setting(
        "colors",
        affects={"steps", "resume"},
        added_later=True,
        description="In which order the patch embedding reads the numbers of a patch: one color after the other, or "
        "one pixel after the other (Gemma 4).",
    )
    positions: Literal["factorized", "grid", "rotary", "factorized_rotary"] = setting(
        "factorized",
        affects={"plan", "steps", "resume"},
        description="Position embeddings. `factorized`: one learned vector for each row plus one for each column, for "
        "images of any shape up to `max_side` patches. `grid`: one learned vector for each position of a fixed "
        "`max_side` x `max_side` grid (CLIP, InternViT). `rotary`: one half of every query and key is rotated by the "
        "row, the other by the column (Qwen2-VL). `factorized_rotary`: both `factorized` and `rotary` (Gemma 4).",
    )
    rotary_base: PositiveFloat = setting(
        10_000.0,
        affects={"resume"},
        added_later=True,
        description="Base of the rotary frequencies, with positions `rotary` or `factorized_rotary`.",
    )
    rotary_frequencies: Literal["alike", "alternating"] = setting(
        "alike",
        affects={"plan", "steps", "resume"},
        added_later=True,
        description="With positions `rotary`: how fast rows and columns rotate. `alike`: by the same frequencies, "
        "those of half a head (Qwen2-VL). `alternating`: by the frequencies of a whole head in turns (Pixtral, arXiv "
        "2410.07073).",
    )
    position_grid: int = setting(
        0,
        ge=0,
        affects={"plan", "steps", "resume"},
        description="With positions `rotary`: side of a square table of learned vectors, which is stretched over each "
        "image, as `position_interpolation` says, and added to its patches (Qwen3-VL). 0: none.",
    )
    position_interpolation: Literal["bilinear", "bicubic"] = setting(
        "bilinear",
        affects={"plan", "steps", "resume"},
        added_later=True,
        description="How the table of `position_grid` is stretched over an image. `bilinear`: corner on corner "
        "(Qwen3-VL). `bicubic`: edge on edge (GLM-4.5V).",
    )
    max_side: PositiveInt = setting(
        64,
        affects={"plan", "lengths", "steps", "resume"},
        description="Longest side of an image in patches that the position embeddings cover.",
    )
    window: int = setting(
        0,
        ge=0,
        affects={"plan", "steps", "resume"},
        description="Side in patches of the squares inside which patches attend to each other (Qwen2.5-VL). 0: all "
        "patches of an image do.",
    )
    full_attention_blocks: tuple[int, ...] = setting(
        (),
        affects={"plan", "steps", "resume"},
        description="With `window`: numbers, from 0, of the blocks in which all patches of an image attend to each "
        "other nevertheless.",
    )
    deepstack: tuple[int, ...] = setting(
        (),
        affects={"plan", "steps", "resume"},
        description="Numbers, from 0 and ascending, of blocks whose outputs reach the LLM too, each through a "
        "projector of its own: those of the first one are added behind the LLM's first block at the places of the "
        "features, those of the second behind its second, and so on (DeepStack, arXiv 2406.04334; Qwen3-VL).",
    )
    class_token: bool = setting(
        False,
        affects={"plan", "lengths", "steps", "resume"},
        description="Prepend a learned class token to each image. It is dropped before downsampling.",
    )
    class_feature: bool = setting(
        False,
        affects={"plan", "lengths", "steps", "resume"},
        description="Keep the class token as the first feature of each image instead (LLaVA's strategy `full`).",
    )
    pre_norm: bool = setting(
        False,
        affects={"plan", "steps", "resume"},
        description="Apply a layer norm to the embedded patches before the first block (CLIP).",
    )
    patch_norm: bool = setting(
        False,
        affects={"plan", "steps", "resume"},
        added_later=True,
        description="Apply a norm to the embedded patches before positions are added (GLM-4.5V).",
    )
    post_norm: bool = setting(
        True, affects={"plan", "steps", "resume"}, description="Apply a layer norm to the output of the last block."
    )
    downsample: Literal["identity", "pixel_shuffle", "average_pool", "linear"] = setting(
        "identity",
        affects={"plan", "steps", "resume"},
        description="How patches become LLM tokens. `identity`: one token for each patch. `pixel_shuffle`: one token "
        "for each square of `merge` x `merge` patches, joined side by side. `average_pool`: one for each such square, "
        "the average of its patches behind the last norm (Gemma 3). `linear`: joined, and mapped to the width of one "
        "patch by a linear without bias, which trains with the projector (Mistral 3).",
    )
    averages: Literal["plain", "scaled", "standardized"] = setting(
        "plain",
        affects={"plan", "steps", "resume"},
        added_later=True,
        description="What `average_pool` does with averages, in fp32. `scaled`: multiply them by the square root of "
        "`hidden`. `standardized`: then also subtract one vector and multiply by another, neither of which trains "
        "(Gemma 4).",
    )
    merge: PositiveInt = setting(
        1,
        affects={"plan", "lengths", "steps", "resume"},
        description="Side in patches of the square that becomes one token. 1 with `identity`.",
    )

    join_tiles: bool = setting(
        False,
        affects={"plan", "lengths", "steps", "resume"},
        description="Join the features of an image's tiles to one picture: leave out features of its borders, and put "
        "a learned vector, which trains with the projector, behind each row (LLaVA-NeXT). Needs the image scheme "
        "`pinpoints`.",
    )
    max_joined_tiles: PositiveInt | None = setting(
        None,
        affects={"plan", "lengths", "steps", "resume"},
        description="With `join_tiles`: a joined picture with clearly more features than so many tiles is shrunk to "
        "as many, by bilinear interpolation (LLaVA-OneVision: 9). Default: pictures keep their features.",
    )
    pool_frames: bool = setting(
        False,
        affects={"plan", "lengths", "steps", "resume"},
        description="With `join_tiles`: halve both sides of the features of a video's frames by bilinear "
        "interpolation, and put the learned vector behind each video (LLaVA-OneVision).",
    )

    @property
    def cell_features(self) -> int:
        """Return the size of a patch: RGB of `patch` x `patch` pixels of each of its frames."""
        return 3 * self.temporal_patch * self.patch**2

    @property
    def tokens_per_feature(self) -> int:
        """Return the patches of the square that the projector merges."""
        return self.merge**2

    @property
    def rotates(self) -> bool:
        """Return whether queries and keys are rotated by row and column."""
        return self.positions in ("rotary", "factorized_rotary")

    @property
    def has_position_tables(self) -> bool:
        """Return whether each row and each column has a learned vector."""
        return self.positions in ("factorized", "factorized_rotary")

    @property
    def pools(self) -> bool:
        """Return whether a token is the average of its patches."""
        return self.downsample == "average_pool"

    @property
    def scales_averages(self) -> bool:
        """Return whether averages are multiplied by the square root of their width."""
        return self.averages != "plain"

    @property
    def merges_by_linear(self) -> bool:
        """Return whether a linear maps the joined patches of a token to the width of one."""
        return self.downsample == "linear"

    @property
    def extra_tokens(self) -> int:
        """Return 1 for models with a class token."""
        return int(self.class_token)

    @property
    def kept_extra_tokens(self) -> int:
        """Return 1 for models that keep their class token."""
        return int(self.class_feature)

    @property
    def sends_newline(self) -> bool:
        """Return whether rows of joined tiles end with a learned vector."""
        return self.join_tiles

    @property
    def query_scale(self) -> float | None:
        """Return 1 where heads have norms."""
        return 1.0 if self.head_norms else None

    @property
    def has_post_norm(self) -> bool:
        """Return whether the recipe asks for a norm after the last block."""
        return self.post_norm

    def joined_size(self, rows: int, cols: int, side: int) -> tuple[int, int]:
        """Return the rows and columns of features of a joined picture; `side` is that of a tile, in features.

        A picture that would be shrunk only a little keeps its features, as in `transformers`.
        """
        if self.max_joined_tiles is None:
            return rows, cols
        shrinkage = sqrt(rows * cols / (self.max_joined_tiles * side**2))
        return (int(rows // shrinkage), int(cols // shrinkage)) if shrinkage > _MIN_SHRINKAGE else (rows, cols)

    @model_validator(mode="after")
    def _consistent(self) -> "VisionSettings":
        problems = []
        if self.hidden % self.heads:
            problems.append(f"hidden {self.hidden} is not divisible by heads {self.heads}")
        if self.downsample == "identity" and self.merge != 1:
            problems.append(f"merge is {self.merge}, but downsample `identity` merges nothing: set merge to 1")
        if self.rotates and self.hidden // self.heads % 4:
            width = self.hidden // self.heads
            problems.append(f"a head is {width} wide; allowed with positions `{self.positions}`: multiples of 4")
        if self.class_token and (self.rotates or self.window):
            problems.append("class_token is set; it has no place with rotary positions or with `window`")
        if self.rotary_base != 10_000.0 and not self.rotates:
            problems.append(f"rotary_base is set beside positions `{self.positions}`; allowed with rotary ones")
        if self.position_grid and self.positions != "rotary":
            problems.append(f"position_grid is set beside positions `{self.positions}`; allowed with `rotary`")
        if self.position_interpolation != "bilinear" and not self.position_grid:
            problems.append("position_interpolation is set; allowed with position_grid")
        if self.rotary_frequencies != "alike" and self.positions != "rotary":
            problems.append(f"rotary_frequencies is set beside positions `{self.positions}`; allowed with `rotary`")
        problems += self._norm_problems()
        problems += self._merge_linear_problems()
        problems += self._window_problems()
        problems += self._deepstack_problems()
        problems += self._resampler_problems()
        if self.post_norm and self.norm == "rms" and self.projector.norm and self.projector.norm_kind == "layer":
            problems.append("projector.norm_kind is `layer`, norm is `rms`; allowed only without post_norm")
        if self.class_feature and not (self.class_token and self.merge == 1):
            problems.append("class_feature keeps the class token beside patches: set class_token, and merge to 1")
        if self.class_feature and self.join_tiles:
            problems.append("class_feature is set; class tokens have no place in the picture that join_tiles makes")
        for name in ("max_joined_tiles", "pool_frames"):
            if getattr(self, name) and not self.join_tiles:
                problems.append(f"{name} is set; allowed with join_tiles")
        return self._without(problems)

    def _norm_problems(self) -> list[str]:
        problems = []
        if self.head_norms and self.norm != "rms":
            problems.append(f"head_norms is set beside norm `{self.norm}`; allowed with `rms`")
        if self.head_norms and self.qk_norm:
            problems.append("head_norms and qk_norm are both set; allowed: one of them")
        if self.post_norms and self.layer_scale:
            problems.append("post_norms and layer_scale are both set; allowed: one of them")
        if self.averages != "plain" and not self.pools:
            problems.append(f"averages is set beside downsample `{self.downsample}`; allowed with `average_pool`")
        if self.averages != "plain" and self.post_norm:
            problems.append("averages is set beside post_norm, which would undo its scale; allowed: without post_norm")
        return problems

    def _merge_linear_problems(self) -> list[str]:
        if not self.merges_by_linear:
            return []
        problems = []
        if self.deepstack:
            problems.append("deepstack is set, but downsample is `linear`; allowed: identity, pixel_shuffle")
        if self.projector.kind not in ("mlp", "linear"):
            problems.append(
                f"projector.kind is `{self.projector.kind}`, but downsample is `linear`; allowed beside it: mlp, linear"
            )
        if self.projector.norm:
            problems.append(
                "projector.norm is set, but downsample is `linear`, which reads patches behind post_norm; leave it out"
            )
        return problems

    def _window_problems(self) -> list[str]:
        outside = [block for block in self.full_attention_blocks if not 0 <= block < self.layers]
        problems = (
            [f"full_attention_blocks names {outside[0]}, but blocks are 0 to {self.layers - 1}"] if outside else []
        )
        if self.full_attention_blocks and not self.window:
            problems.append("full_attention_blocks is set, but without `window` all blocks attend to the whole image")
        return problems

    def _deepstack_problems(self) -> list[str]:
        problems = [
            f"deepstack names {block}, but blocks are 0 to {self.layers - 1}"
            for block in self.deepstack
            if not 0 <= block < self.layers
        ][:1]
        if list(self.deepstack) != sorted(set(self.deepstack)):
            problems.append(f"deepstack is {list(self.deepstack)}; allowed: numbers that ascend")
        if self.deepstack and self.projector.kind != "mlp":
            problems.append(f"deepstack is set, but projector.kind is `{self.projector.kind}`; allowed: mlp")
        if self.deepstack and self.projector.norm_kind == "plain_rms":
            problems.append("deepstack is set, but projector.norm_kind is `plain_rms`; allowed: norms with weights")
        if self.deepstack and self.pools:
            problems.append("deepstack is set, but downsample is `average_pool`; allowed: identity, pixel_shuffle")
        return problems
