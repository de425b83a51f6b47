"""Write drawn images as PNG files, and a grid of them beside their targets."""

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from mmtrain.data import Sample
from mmtrain.data.formats.sample import IMAGE_MARK, MEDIA_ROLES
from mmtrain.durable_files import write_whole
from mmtrain.errors import UserError, writing

GRID_FILE = "grid.png"
LIST_FILE = "samples.json"
DRAWN_FOLDER, BLANKED_FOLDER, TARGET_FOLDER = "drawn", "blanked", "target"
MAX_GRID_ENTRIES = 64
_GRID_COLUMNS = 4
_MIN_SIDE, _MAX_SIDE = 72, 256  # pixels of an image in the grid; small ones are enlarged, large ones reduced
_GAP = 4
_TEXT_ROWS = 14  # pixels
_FONT_SIZE = 11
_BACKGROUND, _INK = (255, 255, 255), (30, 30, 30)
_MAX_NAME_CHARACTERS = 80
Uint8Array = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class DrawnImage:
    """One image that the model drew, its target, and what it drew with a blanked caption; (rows, columns, 3) each."""

    number: int  # of the sample, in the held-out data
    place: int  # among the images that the sample draws
    sample: Sample
    target: Uint8Array
    drawn: Uint8Array
    blanked: Uint8Array | None

    @property
    def caption(self) -> str:
        """What the user asked for last before the image."""
        asked = ""
        remaining = self.place
        for turn in self.sample.turns:
            if turn.role in MEDIA_ROLES:
                asked = turn.text
            elif turn.role == "assistant":
                remaining -= turn.text.count(IMAGE_MARK)
                if remaining < 0:
                    break
        return asked.replace(IMAGE_MARK, "").strip()

    @property
    def file_name(self) -> str:
        """The name of its file: the sample's id, made safe, behind the sample's number, which makes it unique."""
        safe = re.sub(r"[^A-Za-z0-9._-]+", "_", self.sample.id)[:_MAX_NAME_CHARACTERS]
        return f"{self.number:05d}-{self.place}-{safe}.png"


def require_own_folder(folder: Path) -> None:
    """Raise UserError for a folder that holds anything but images of an evaluation before, and for a file."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--samples: {folder} is no folder; name one, which is made if it does not exist")
    if folder.exists() and any(folder.iterdir()) and not (folder / LIST_FILE).exists():
        raise UserError(f"--samples: {folder} is not empty and holds no drawn images; name another folder or empty it")


def write_images(folder: Path, images: Sequence[DrawnImage]) -> None:
    """Write drawn images, targets, a list of them, and the grid; those of an evaluation before are replaced.

    Raises UserError for a folder that cannot be written.
    """
    with writing("--samples", folder, "drawn images"):
        for name in (DRAWN_FOLDER, BLANKED_FOLDER, TARGET_FOLDER):
            shutil.rmtree(folder / name, ignore_errors=True)
        _write_list(folder, images)
        for image in images:
            by_folder = {TARGET_FOLDER: image.target, DRAWN_FOLDER: image.drawn, BLANKED_FOLDER: image.blanked}
            for name, pixels in by_folder.items():
                if pixels is not None:
                    (folder / name).mkdir(exist_ok=True)
                    Image.fromarray(pixels).save(folder / name / image.file_name)
        draw_grid(images).save(folder / GRID_FILE)


def _write_list(folder: Path, images: Sequence[DrawnImage]) -> None:
    """Write which file belongs to which sample and caption."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "file": image.file_name,
            "sample": image.sample.id,
            "source": image.sample.source,
            "place": image.place,
            "caption": image.caption,
        }
        for image in images
    ]
    write_whole(folder / LIST_FILE, json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


def draw_grid(images: Sequence[DrawnImage]) -> Image.Image:
    """Draw a grid of entries in order: target, drawn image, the one of a blanked caption if there is one; caption."""
    shown = images[:MAX_GRID_ENTRIES]
    side = min(max(_MIN_SIDE, *(max(image.target.shape[:2]) for image in shown)), _MAX_SIDE) if shown else _MIN_SIDE
    per_entry = 3 if any(image.blanked is not None for image in shown) else 2
    entry_width = per_entry * (side + _GAP) + 2 * _GAP
    entry_height = side + _TEXT_ROWS + 2 * _GAP
    columns = min(_GRID_COLUMNS, max(len(shown), 1))
    rows = max(-(-len(shown) // columns), 1)
    grid = Image.new("RGB", (columns * entry_width, _TEXT_ROWS + rows * entry_height), _BACKGROUND)
    draw, font = ImageDraw.Draw(grid), ImageFont.load_default(size=_FONT_SIZE)
    titles = ("target", "drawn", "blanked")[:per_entry]
    for column in range(columns):
        for place, title in enumerate(titles):
            draw.text((column * entry_width + _GAP + place * (side + _GAP), 0), title, font=font, fill=_INK)
    for position, image in enumerate(shown):
        row, column = divmod(position, columns)
        left, top = column * entry_width + _GAP, _TEXT_ROWS + row * entry_height
        for place, pixels in enumerate((image.target, image.drawn, image.blanked)):
            if pixels is not None:
                grid.paste(_resized(pixels, side), (left + place * (side + _GAP), top))
        caption = _fitting(image.caption, entry_width - 3 * _GAP, font)
        draw.text((left, top + side + 1), caption, font=font, fill=_INK)
    return grid


def _resized(pixels: Uint8Array, side: int) -> Image.Image:
    """Return an image whose longer side is `side`; an enlarged one keeps its pixels visible."""
    image = Image.fromarray(pixels)
    longest = max(image.size)
    size = max(image.width * side // longest, 1), max(image.height * side // longest, 1)
    return image.resize(size, Image.Resampling.NEAREST if longest < side else Image.Resampling.LANCZOS)


def _fitting(text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """Return as much of a text's first line as fits into `width` pixels."""
    line = text.split("\n")[0]
    if font.getlength(line) <= width:
        return line
    while line and font.getlength(line + "...") > width:
        line = line[:-1]
    return line + "..."
