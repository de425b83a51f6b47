"""The processor of LLaVA-OneVision put together from its parts: as a whole it needs torchvision, for videos."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch


def feature_counter(image_processor: Any, num_image_tokens: int, aspect: str) -> Any:
    """Return a processor that only counts features, and writes their tokens."""
    from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

    counter = LlavaOnevisionProcessor.__new__(LlavaOnevisionProcessor)
    counter.image_processor, counter.num_image_tokens = image_processor, num_image_tokens
    counter.vision_feature_select_strategy, counter.vision_aspect_ratio = "full", aspect
    counter.image_token, counter.video_token = "<image>", "<video>"
    return counter


class ComposedProcessor:
    """Reads conversations about pictures as `apply_chat_template` of the processor in a folder."""

    def __init__(self, folder: Path) -> None:
        import transformers

        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._image = self._tokenizer.image_token
        self._images = transformers.LlavaOnevisionImageProcessorPil(
            **json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
        )
        stated = json.loads((folder / "processor_config.json").read_text(encoding="utf-8"))
        self._counter = feature_counter(self._images, stated["num_image_tokens"], stated["vision_aspect_ratio"])

    def of_video(self, messages: list[dict[str, Any]], frames: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the arguments of the model for a conversation about one video of prepared frames (F, 3, H, W)."""
        text = self._tokenizer.apply_chat_template(messages, tokenize=False)
        expansion = self._counter.replace_video_token({"pixel_values_videos": [frames]}, 0)
        ids = self._tokenizer(text.replace("<video>", expansion), add_special_tokens=False)["input_ids"]
        return {"input_ids": torch.tensor([ids]), "pixel_values_videos": frames[None]}

    def __call__(self, messages: list[dict[str, Any]], **options: bool) -> dict[str, torch.Tensor]:
        """Return the arguments of the model for one conversation."""
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
        pictures = [part["image"] for turn in messages for part in turn["content"] if part["type"] == "image"]
        pixels: dict[str, Any] = {}
        if pictures:
            pixels = dict(self._images([pictures], return_tensors="np"))  # those of one conversation
            for number in range(len(pictures)):
                expansion = self._counter.replace_image_token(pixels, number).replace("image", "mark")
                text = text.replace(self._image, expansion, 1)
        ids = self._tokenizer(text.replace("<mark>", self._image), add_special_tokens=False)["input_ids"]
        arguments = {name: torch.from_numpy(np.asarray(value)) for name, value in pixels.items()}
        return {"input_ids": torch.tensor([ids]), **arguments}
