"""Draw the demo's pictures with Pillow's primitives and its built-in font."""

import random

from PIL import Image, ImageDraw, ImageFont

Rgb = tuple[int, int, int]
Box = tuple[float, float, float, float]

COLOURS: dict[str, Rgb] = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (40, 80, 220),
    "yellow": (235, 205, 30),
    "purple": (150, 50, 190),
    "black": (25, 25, 25),
}
_ZOOMS = (1, 1, 1, 2)  # one picture in four has twice the resolution
_SMOOTHING = 8  # a picture with smooth edges is drawn so many times larger
SHAPES = ("circle", "square", "triangle", "cross")


def draw_scene(rng: random.Random, objects: list[tuple[str, str]]) -> Image.Image:
    """Draw (shape, colour) objects in reading order, without overlap, on a light background of random size."""
    zoom = rng.choice(_ZOOMS)
    across, down = _grid_for(len(objects))
    width = zoom * (48 if across > 1 else rng.choice((32, 48)))
    height = zoom * (48 if down > 1 else rng.choice((32, 48)))
    image, draw = _background(rng, width, height)
    cells = sorted(rng.sample([(y, x) for y in range(down) for x in range(across)], len(objects)))
    for (shape, colour), (y, x) in zip(objects, cells, strict=True):
        cell_w, cell_h = width / across, height / down
        side = min(cell_w, cell_h, 28 * zoom) * rng.uniform(0.75, 0.95)
        left = x * cell_w + _near_middle(rng, cell_w - side, zoom)
        top = y * cell_h + _near_middle(rng, cell_h - side, zoom)
        _shape(draw, shape, (left, top, left + side, top + side), vary_colour(rng, COLOURS[colour]))
    return image


def draw_digit(rng: random.Random, value: int) -> Image.Image:
    """Draw one digit of random size, position and colour."""
    width, height = rng.choice(((32, 32), (32, 32), (32, 48), (48, 32)))
    image, draw = _background(rng, width, height)
    font = ImageFont.load_default(size=rng.choice((32, 38)))
    left, top, right, bottom = draw.textbbox((0, 0), str(value), font=font)
    x = _near_middle(rng, width - (right - left), zoom=1) - left
    y = _near_middle(rng, height - (bottom - top), zoom=1) - top
    draw.text((x, y), str(value), font=font, fill=vary_colour(rng, COLOURS[rng.choice(list(COLOURS))]))
    return image


def draw_bar_chart(rng: random.Random, bars: list[tuple[str, int]]) -> Image.Image:
    """Draw bars of (colour, height 1 to 5) on a base line, with a thin line at each height."""
    zoom = rng.choice(_ZOOMS)
    width, height = zoom * rng.choice((32, 48)), zoom * rng.choice((32, 48))
    image, draw = _background(rng, width, height)
    base = height - 2
    unit = (height - 4) / 5
    for level in range(6):
        draw.line((0, base - level * unit, width, base - level * unit), fill=(190, 190, 190))
    slot = width / len(bars)
    for i, (colour, value) in enumerate(bars):
        box = (i * slot + slot * 0.15, base - value * unit, (i + 1) * slot - slot * 0.15, base)
        draw.rectangle(box, fill=vary_colour(rng, COLOURS[colour]))
    return image


def _grid_for(num_objects: int) -> tuple[int, int]:
    """Return the columns and rows of cells for this number of objects."""
    if num_objects == 1:
        return 1, 1
    return (2, 2) if num_objects <= 4 else (3, 2)


def _background(rng: random.Random, width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    shade = rng.randint(235, 255)
    image = Image.new("RGB", (width, height), (shade, shade, shade))
    return image, ImageDraw.Draw(image)


def _near_middle(rng: random.Random, space: float, zoom: int) -> float:
    """Return a random start for an object that leaves `space` pixels free: up to three (zoomed) off the middle."""
    return space / 2 + min(space / 2, 3 * zoom) * rng.uniform(-1, 1)


def draw_shape_at(side: int, shape: str, box: Box, colour: Rgb, shade: int) -> Image.Image:
    """Draw one shape in a box of a square picture, with smooth edges, on a background of a gray shade."""
    zoomed = Image.new("RGB", (side * _SMOOTHING, side * _SMOOTHING), (shade, shade, shade))
    left, top, right, bottom = (_SMOOTHING * edge for edge in box)
    _shape(ImageDraw.Draw(zoomed), shape, (left, top, right - 1, bottom - 1), colour)  # Pillow draws the last pixel too
    return zoomed.resize((side, side), Image.Resampling.BOX)


def vary_colour(rng: random.Random, colour: Rgb) -> Rgb:
    """Return a colour near another one."""
    r, g, b = (min(max(c + rng.randint(-15, 15), 0), 255) for c in colour)
    return r, g, b


def _shape(draw: ImageDraw.ImageDraw, shape: str, box: Box, colour: Rgb) -> None:
    left, top, right, bottom = box
    if shape == "circle":
        draw.ellipse(box, fill=colour)
    elif shape == "square":
        draw.rectangle(box, fill=colour)
    elif shape == "triangle":
        draw.polygon([((left + right) / 2, top), (right, bottom), (left, bottom)], fill=colour)
    else:
        arm = (right - left) / 3
        draw.rectangle((left + arm, top, right - arm, bottom), fill=colour)
        draw.rectangle((left, top + arm, right, bottom - arm), fill=colour)
