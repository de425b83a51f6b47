"""The processor of Pixtral and Mistral 3 without torchvision, which it imports for one function on sizes."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

_MODELS = "transformers.models.pixtral"
_FILE_KEYS = ("patch_size", "spatial_merge_size", "image_token", "image_break_token", "image_end_token")


def processor_class() -> Any:
    """Return the class; where there is no torchvision, the function comes from the image processor for Pillow."""
    if importlib.util.find_spec("torchvision") is not None:
        from transformers import PixtralProcessor

        return PixtralProcessor
    name = f"{_MODELS}.processing_pixtral"
    if name not in sys.modules:
        with pytest.MonkeyPatch.context() as patch:
            for_pillow = importlib.import_module(f"{_MODELS}.image_processing_pil_pixtral")
            patch.setitem(sys.modules, f"{_MODELS}.image_processing_pixtral", for_pillow)
            importlib.import_module(name)
    return sys.modules[name].PixtralProcessor


def open_processor(folder: Path) -> Any:
    """Return the processor of a folder, which resizes by Pillow: torchvision differs at sharp edges."""
    from transformers import AutoTokenizer

    for_pillow = importlib.import_module(f"{_MODELS}.image_processing_pil_pixtral")
    stated = json.loads((folder / "processor_config.json").read_text(encoding="utf-8"))
    return processor_class()(
        for_pillow.PixtralImageProcessorPil.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
        chat_template=(folder / "chat_template.jinja").read_text(encoding="utf-8"),
        **{key: stated[key] for key in _FILE_KEYS},
    )
