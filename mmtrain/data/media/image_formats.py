"""The image formats that Pillow decodes here."""

from contextlib import suppress
from functools import cache

from PIL import features

# Without formats that Pillow hands to other programs (EPS to Ghostscript).
_ALWAYS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")


@cache
def supported_formats() -> tuple[str, ...]:
    """Return the names of the formats that can be read, as `Image.open` takes them.

    AVIF comes with Pillow from version 11.3 on; HEIF, the format of telephones, needs the package `pillow-heif`.
    """
    formats = list(_ALWAYS)
    if "avif" in features.modules and features.check("avif"):
        formats.append("AVIF")
    with suppress(ImportError, OSError):  # OSError: it is installed, and a library that it loads is not
        import pillow_heif

        pillow_heif.register_heif_opener()
        formats.append("HEIF")
    return tuple(formats)


def describe_unknown_format() -> str:
    """Say that something is no image of a known format, and what would read other formats."""
    missing = "" if "HEIF" in supported_formats() else "; for HEIC and HEIF: pip install 'mmtrain[heif]'"
    return f"not an image of a known format ({', '.join(supported_formats())}{missing})"
