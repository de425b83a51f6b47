"""Bring a picture to the size of its item: stretched, cropped or padded."""

from PIL import Image

from mmtrain.recipe.settings.data_settings import ImageSettings

Size = tuple[int, int]  # width, height in pixels

_FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


def fit_picture(rgb: Image.Image, size: Size, settings: ImageSettings) -> Image.Image:
    """Return the picture in this size; `settings.fit` says what becomes of another aspect ratio."""
    if settings.fit == "crop":
        resized = _resize(rgb, covering_size(rgb.size, size), settings)
        left, top = (resized.width - size[0]) // 2, (resized.height - size[1]) // 2
        return resized.crop((left, top, left + size[0], top + size[1]))
    if settings.fit == "pad" and rgb.width != rgb.height:
        side = max(rgb.size)
        red, green, blue = (int(255 * channel) for channel in settings.mean)
        square = Image.new("RGB", (side, side), (red, green, blue))
        square.paste(rgb, ((side - rgb.width) // 2, (side - rgb.height) // 2))
        rgb = square
    return _resize(rgb, size, settings)


def covering_size(source: Size, target: Size) -> Size:
    """Return the smallest size with the aspect ratio of `source` that covers `target`.

    The side that reaches beyond is rounded down, as torchvision and `transformers` do, but not below the target's.
    """
    width, height = source
    if width * target[1] <= height * target[0]:  # narrower than the target
        return target[0], max(target[1], target[0] * height // width)
    return max(target[0], target[1] * width // height), target[1]


def _resize(rgb: Image.Image, size: Size, settings: ImageSettings) -> Image.Image:
    return rgb if rgb.size == size else rgb.resize(size, _FILTERS[settings.resample])
