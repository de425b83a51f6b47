"""The processor of Gemma 4 without torchvision, which it needs for nothing but videos."""

from pathlib import Path
from typing import Any


class _NoVideos:
    """Takes the place of the processor of videos, whose class needs torchvision."""


def open_processor(folder: Path) -> Any:
    """Return the processor of a folder, which resizes by Pillow: torchvision differs at sharp edges."""
    from transformers import AutoTokenizer, Gemma4Processor
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    class Processor(Gemma4Processor):
        """The processor of pictures and texts."""

        def check_argument_for_proper_class(self, argument_name: str, argument: object) -> None:
            """Take any processor of videos."""

    return Processor(
        feature_extractor=Gemma4AudioFeatureExtractor(),
        image_processor=Gemma4ImageProcessorPil.from_pretrained(folder),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        video_processor=_NoVideos(),
        chat_template=(folder / "chat_template.jinja").read_text(encoding="utf-8"),
    )
