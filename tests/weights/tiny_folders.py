"""Folders of tiny models that tests write."""

from pathlib import Path

from PIL import Image

# In the place of the two thousand that users get, whose pictures take longer to draw than most tests to run.
FEW_CONVERSATIONS = 200


def write_other_shapes(conversations: Path) -> None:
    """Stretch every second picture, so that some are larger than a processor leaves them."""
    for number, path in enumerate(sorted(conversations.rglob("*.png"))):
        if number % 2:
            with Image.open(path) as picture:
                stretched = picture.resize((17 + 13 * number % 120, 16 + 29 * number % 90))
            stretched.save(path)
