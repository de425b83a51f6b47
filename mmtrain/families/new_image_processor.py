"""Write the config of an image processor from the settings of `data.image`: the way back from `image_processors`."""

from collections.abc import Mapping
from typing import Any

FILTERS = {"lanczos": 1, "bilinear": 2, "bicubic": 3}  # numbers of Pillow's filters


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
