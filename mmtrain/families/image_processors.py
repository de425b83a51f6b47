"""Read how a folder's image processor prepares pictures, as settings of `data.image`, and write such a processor."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mmtrain.errors import ModelFolderError
from mmtrain.families.clip import MEAN, STD
from mmtrain.families.config_section import ConfigSection
from mmtrain.families.family import Settings
from mmtrain.families.processor_files import AUDIO_KEYS, read_processor

_HALF = (0.5, 0.5, 0.5)
_GEMMA4 = "Gemma4ImageProcessor"
GEMMA4_TOKENS = (70, 140, 280, 560, 1120)  # of a picture at most, that its processor allows
Canvases = tuple[tuple[int, int], ...]  # height, width in pixels
LLAVA_NEXT_PINPOINTS: Canvases = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
LLAVA_ONEVISION_PINPOINTS: Canvases = tuple((384 * rows, 384 * cols) for rows in range(1, 7) for cols in range(1, 7))
# Keys that are not about pixels, or that say how a processor works on a GPU.
_WITHOUT_EFFECT = (
    "image_processor_type", "processor_class", "feature_extractor_type", "return_tensors", "data_format",
    "input_data_format", "device", "disable_grouping", "default_to_square", "image_seq_length",
    "num_additional_image_tokens", "patch_size", "vision_feature_select_strategy", "return_metadata",
)  # fmt: skip
FILTERS = {"lanczos": 1, "bilinear": 2, "bicubic": 3}  # numbers of Pillow's filters
_FILTER_NAMES = {number: name for name, number in FILTERS.items()}


def read_image_settings(folder: Path, passed: Mapping[str, object] | None = None) -> Settings | None:
    """Return the settings of `data.image` under which pixels are those of the folder's processor.

    passed: what the family's processor passes to that of images, whatever the folder states.

    Returns None for a folder that states no processor of images. Raises ModelFolderError, which names what is not
    supported.
    """
    stated = read_processor(folder, "image")
    if stated is None or _is_of_clips(stated.config):
        return None
    return image_processor_settings({**stated.config, **(passed or {})}, stated.where)


def image_processor_settings(config: Mapping[str, object], where: str) -> Settings:
    """Return the settings of `data.image` that the config of an image processor states; `where` it was found.

    Raises ModelFolderError, which names what is not supported.
    """
    kind = _kind(config)
    if kind not in _READERS:
        raise ModelFolderError(
            f"{where}: image_processor_type {kind!r} is not supported yet; supported: {', '.join(_READERS)}. "
            "data.image.scheme in the recipe chooses another way to prepare pictures"
        )
    section = ConfigSection(config)
    # A folder may state the processors of pictures and clips together.
    section.pass_over(*_WITHOUT_EFFECT, *AUDIO_KEYS)
    for key in ("do_resize", "do_rescale"):
        section.require(key, True, None, default=True)
    if kind == _GEMMA4:  # its model brings pixels from [0, 1] to [-1, 1]
        section.require("do_normalize", False, None, default=False)
    else:
        section.require("do_normalize", True, None, default=True)
    section.require("do_convert_rgb", True, None, default=True)
    section.require("rescale_factor", 1 / 255, None, default=1 / 255)
    settings = {**_READERS[kind](section), "decode": "full"}
    section.finish()
    if section.problems:
        raise ModelFolderError(f"{where} ({kind}): " + "; ".join(section.problems))
    return settings


def _is_of_clips(config: Mapping[str, object]) -> bool:
    """Return whether a file that may state processors of both states that of clips only."""
    return "image_processor_type" not in config and config.get("feature_extractor_type") == "WhisperFeatureExtractor"


def _kind(config: Mapping[str, object]) -> str:
    """Return what the processor is called, without the suffixes that say what it computes with.

    Folders from before there were image processors call it a feature extractor.
    """
    older_name = str(config.get("feature_extractor_type", "none")).replace("FeatureExtractor", "ImageProcessor")
    return str(config.get("image_processor_type", older_name)).removesuffix("Fast").removesuffix("Pil")


def _clip(section: ConfigSection) -> Settings:
    """Resize the shorter side and cut out the middle; or stretch, if both sides are given."""
    section.require("do_center_crop", True, None, default=True)
    section.require("do_pad", False, None, default=False)
    return {**_square(section), **_normalization(section, MEAN, STD)}


def _llava(section: ConfigSection) -> Settings:
    """Pad to a square first, if `do_pad` says so; what CLIP cuts off afterwards is then nothing."""
    section.require("do_center_crop", True, None, default=True)
    square = _square(section)
    fit = "pad" if section.flag("do_pad", False) else square["fit"]
    return {**square, "fit": fit, **_normalization(section, MEAN, STD)}


def _siglip(section: ConfigSection, filter_number: int = 3) -> Settings:
    """Stretch to a square."""
    section.require("do_center_crop", False, None, default=None)
    side = _stretched_side(section, "size", 224)
    fixed = {"scheme": "fixed", "size": side, "fit": "stretch", "partial_patches": "drop"}
    return {**fixed, **_normalization(section, _HALF, _HALF, filter_number)}


def _gemma3(section: ConfigSection) -> Settings:
    """Stretch to a square. Pan and scan would show crops of a picture too, with sentences of its own between them."""
    if section.value("do_pan_and_scan"):
        section.reject(
            "do_pan_and_scan",
            "true is not supported yet; supported: false, null. Set it to false to show pictures as a whole only",
        )
    section.pass_over("pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops", "pan_and_scan_min_ratio_to_activate")
    return _siglip(section, filter_number=2)


def _square(section: ConfigSection) -> Settings:
    """Read `size` and `crop_size`, which must agree. In older folders they are numbers."""
    if type(section.value("size")) is int and type(section.value("crop_size")) is int:
        side = section.integer("crop_size")
        section.require("size", side, default=side)
        return {"scheme": "fixed", "size": side, "fit": "crop"}
    side = _stretched_side(section, "crop_size", 224)
    size = section.section("size")
    is_cropped = section.value("size") is None or size.value("shortest_edge") is not None
    for key in ("shortest_edge",) if is_cropped else ("height", "width"):
        if size.integer(key, None if section.value("size") is not None else 224) != side:
            size.reject(key, f"{size.value(key)} is not supported yet beside a crop_size of {side}; supported: {side}")
    size.finish()
    return {"scheme": "fixed", "size": side, "fit": "crop" if is_cropped else "stretch"}


def _stretched_side(section: ConfigSection, key: str, default: int) -> int:
    """Read the side of a square that is stated as height and width."""
    square = section.section(key)
    if section.value(key) is None:
        return default
    side = square.integer("height")
    square.require("width", side, default=None)
    square.finish()
    return side


def _tiles(section: ConfigSection) -> Settings:
    """Cut into tiles, or stretch to one."""
    side = _stretched_side(section, "size", 384)
    section.require("min_patches", 1, default=1)
    max_tiles = section.integer("max_patches", 12)
    if section.flag("crop_to_patches", False):
        layout: Settings = {"scheme": "tiles", "tile": side, "max_tiles": max_tiles}
    else:
        layout = {"scheme": "fixed", "size": side, "fit": "stretch"}
    return {**layout, **_normalization(section, MEAN, STD)}


def _pinpoints(section: ConfigSection) -> Settings:
    """Show all of the image in one tile; then put it on the best of several canvases, which is cut into tiles."""
    section.require("do_center_crop", True, None, default=True)
    section.require("do_pad", True, None, default=True)  # batches of images with different numbers of tiles
    section.require("aspect_ratio_setting", "anyres", default="anyres")
    canvases = {
        "scheme": "pinpoints",
        "tile": _square(section)["size"],
        "pinpoints": read_canvases(section, LLAVA_NEXT_PINPOINTS),
        "tile_several": True,
        "partial_patches": "drop",
    }
    return {**canvases, **_normalization(section, MEAN, STD)}


def _pinpoints_of_single_images(section: ConfigSection) -> Settings:
    """Do so with images that are alone in their sample; pad others to squares."""
    section.require("do_center_crop", False, None, default=None)
    section.require("do_pad", True, None, default=True)
    side = _stretched_side(section, "size", 384)
    canvases = {
        "scheme": "pinpoints",
        "tile": side,
        "pinpoints": read_canvases(section, LLAVA_ONEVISION_PINPOINTS),
        "tile_several": False,
        "partial_patches": "drop",
    }
    return {**canvases, **_normalization(section, MEAN, STD)}


def read_canvases(section: ConfigSection, default: Canvases) -> Canvases:
    """Return the canvases of `image_grid_pinpoints`, in a processor's config or a model's."""
    pinpoints = section.value("image_grid_pinpoints")
    if pinpoints is None:
        return default
    is_list = isinstance(pinpoints, list) and all(isinstance(canvas, list) and len(canvas) == 2 for canvas in pinpoints)
    if is_list and all(type(side) is int and side > 0 for canvas in pinpoints for side in canvas):
        return tuple((height, width) for height, width in pinpoints)
    section.reject("image_grid_pinpoints", "allowed: a list of [height, width] in pixels")
    return default


def _native(section: ConfigSection) -> Settings:
    """Keep the aspect ratio. Older folders state limits by names of their own, which take precedence."""
    section.pass_over("merge_size", "temporal_patch_size")  # the encoder's, as `check_encoder_agreement` checks
    limits = {
        "scheme": "native",
        "pixel_limits": "image",
        "min_pixels": pixel_limit(section, "min_pixels", "shortest_edge", 56 * 56),
        "max_pixels": pixel_limit(section, "max_pixels", "longest_edge", 28 * 28 * 1280),
    }
    return {**limits, **_normalization(section, MEAN, STD)}


def _native_of_frames(section: ConfigSection) -> Settings:
    """Keep the aspect ratio, within limits that count the frames of a patch."""
    section.pass_over("merge_size", "temporal_patch_size")
    section.pass_over("min_pixels", "max_pixels")  # `size` alone has an effect there
    size, is_stated = section.section("size"), section.value("size") is not None
    limits = {
        "scheme": "native",
        "pixel_limits": "frames",
        "min_pixels": size.integer("shortest_edge", None if is_stated else 112 * 112),
        "max_pixels": size.integer("longest_edge", None if is_stated else 28 * 28 * 15000),
    }
    size.finish()
    return {**limits, **_normalization(section, MEAN, STD)}


def _native_in_square(section: ConfigSection) -> Settings:
    """Keep the aspect ratio of pictures, which must fit into a square."""
    section.require("do_center_crop", False, None, default=None)
    section.pass_over("do_pad")  # of batches of pictures, behind all that is computed
    size, is_stated = section.section("size"), section.value("size") is not None
    if is_stated and size.value("longest_edge") is None:
        longest = size.integer("height")
        size.require("width", longest, default=None)
    else:
        longest = size.integer("longest_edge", None if is_stated else 1024)
    size.finish()
    limits = {"scheme": "native", "pixel_limits": "sides", "min_pixels": 1, "max_pixels": longest**2}
    return {**limits, **_normalization(section, MEAN, STD)}


def _native_of_area(section: ConfigSection) -> Settings:
    """Keep the aspect ratio of pictures, which all become as many whole merged patches as there may be."""
    section.pass_over("image_mean", "image_std", "size")  # without effect there
    unit = section.integer("patch_size", 16) * section.integer("pooling_kernel_size", 3)
    num_tokens = section.integer("max_soft_tokens", 280)
    if num_tokens not in GEMMA4_TOKENS:
        allowed = ", ".join(map(str, GEMMA4_TOKENS))
        section.reject("max_soft_tokens", f"found {num_tokens}, allowed: {allowed}")
    limits = {"scheme": "native", "pixel_limits": "area", "min_pixels": 1, "max_pixels": num_tokens * unit**2}
    return {**limits, **_normalization(section, _HALF, _HALF), "mean": _HALF, "std": _HALF}  # of its model


def pixel_limit(section: ConfigSection, key: str, edge: str, default: int | None) -> int | None:
    """Read a limit of pixels by its older name `key`, or as an `edge` of `size`; `default` if there is neither."""
    size = section.section("size")
    if section.value(key) is not None:
        return section.integer(key)
    return default if section.value("size") is None else size.integer(edge)


def _normalization(
    section: ConfigSection, mean: tuple[float, ...], std: tuple[float, ...], assumed_filter: int = 3
) -> Settings:
    """Read the filter, and what is subtracted and divided by; the arguments are what the processor assumes."""
    filter_number = section.value("resample")
    if filter_number is None:
        filter_number = assumed_filter
    if type(filter_number) is not int or filter_number not in _FILTER_NAMES:
        section.reject("resample", f"filter {filter_number} is not supported yet; supported: 1, 2, 3")
        filter_number = assumed_filter
    return {
        "resample": _FILTER_NAMES[filter_number],
        "mean": _three(section, "image_mean", mean),
        "std": _three(section, "image_std", std),
    }


def _three(section: ConfigSection, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    value = section.value(key)
    if value is None:
        return default
    if isinstance(value, list) and len(value) == 3 and all(type(number) in (int, float) for number in value):
        return tuple(map(float, value))
    section.reject(key, f"found {value}, allowed: three numbers")
    return default


# By the name that the folder states, without the suffixes that say what it computes with.
_READERS: Mapping[str, Callable[[ConfigSection], Settings]] = {
    "CLIPImageProcessor": _clip,
    "LlavaImageProcessor": _llava,
    "SiglipImageProcessor": _siglip,
    "Gemma3ImageProcessor": _gemma3,
    "GotOcr2ImageProcessor": _tiles,
    "LlavaNextImageProcessor": _pinpoints,
    "LlavaOnevisionImageProcessor": _pinpoints_of_single_images,
    "Qwen2VLImageProcessor": _native,
    "Glm4vImageProcessor": _native_of_frames,
    "Glm46VImageProcessor": _native_of_frames,
    "PixtralImageProcessor": _native_in_square,
    _GEMMA4: _native_of_area,
}


def clip_image_processor(image: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a processor that brings pictures to `size` x `size` as `fit` says.

    That of CLIP stretches or crops; that of LLaVA pads, and then does what CLIP's does.
    """
    side, fit = image["size"], image["fit"]
    is_stretched = fit == "stretch"
    config: dict[str, Any] = {
        "image_processor_type": "LlavaImageProcessor" if fit == "pad" else "CLIPImageProcessor",
        "size": {"height": side, "width": side} if is_stretched else {"shortest_edge": side},
        "do_center_crop": True,
        "crop_size": {"height": side, "width": side},
        **_pixels(image),
    }
    return {**config, "do_pad": True} if fit == "pad" else config


def llava_next_image_processor(image: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config, but its canvases, of a processor that cuts pictures into tiles."""
    side = image["tile"]
    return {
        "image_processor_type": "LlavaNextImageProcessor",
        "size": {"shortest_edge": side},
        "do_center_crop": True,
        "crop_size": {"height": side, "width": side},
        "do_pad": True,
        **_pixels(image),
    }


def llava_onevision_processors(image: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config, but its canvases, of a processor that cuts single pictures into tiles, and that of videos."""
    size = {"size": {"height": image["tile"], "width": image["tile"]}}
    images = {"image_processor_type": "LlavaOnevisionImageProcessor", **size, "do_pad": True, **_pixels(image)}
    return images, {"video_processor_type": "LlavaOnevisionVideoProcessor", **size, **_pixels(image)}


def _pixels(image: Mapping[str, Any]) -> dict[str, Any]:
    """Return how pixels are computed, whatever the layout."""
    return {
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_convert_rgb": True,
        "resample": FILTERS[image["resample"]],
        "image_mean": list(image["mean"]),
        "image_std": list(image["std"]),
    }
