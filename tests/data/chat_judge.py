"""What transformers makes of a conversation: the ids of the processor's call, and which of them an assistant wrote."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from packaging.version import Version
from transformers import AutoTokenizer, BatchFeature
from transformers.processing_utils import ProcessorMixin
from transformers.utils import chat_template_utils

from mmtrain.data.text.chat_template import TEMPLATE_DATE
from mmtrain.data.text.sample_tokenizer import total_features
from tests.data.chat_families import CHAT_FAMILIES, ChatFamily
from tests.data.drawn_conversations import DrawnConversation
from tests.data.model_folders import MARK_ANSWERS

# Before, a processor's mask was that of the text before the texts of media were written into it.
KNOWS_MASKS_WITH_MEDIA = Version(transformers.__version__) >= Version("5.24")


@dataclass(frozen=True)
class Judged:
    """The ids of a conversation, and whether each is the assistant's; None where transformers does not know."""

    ids: list[int]
    is_target: list[bool] | None


class _Processor(ProcessorMixin):
    """The processor of any family, as far as text goes: the texts of media are given, and all else is transformers'."""

    def __init__(self, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer
        self.texts: dict[str, list[str]] = {}  # kind of media -> what is written for each

    def __call__(self, text: str, images: Any = None, videos: Any = None, audio: Any = None, **options: Any) -> Any:
        wants_offsets = options.pop("return_text_replacement_offsets", False)
        texts = (self.texts.get(kind, []) for kind in ("image", "video", "audio"))
        written, offsets = self.get_text_with_replacements([text], *texts)
        output = dict(self.tokenizer(written, **options))
        if wants_offsets:
            output["text_replacement_offsets"] = offsets
        return BatchFeature(output)


class ChatJudge:
    """Applies the chat template of a family's folder as transformers does for who serves a model of the family."""

    def __init__(self, chat: ChatFamily, tokenizer: Any) -> None:
        """Judge with the tokenizer that transformers opens in the folder."""
        self._chat, self._tokenizer = chat, tokenizer
        self._is_processor = bool(chat.tokens)
        self._marked = chat.template
        for comment, tag in MARK_ANSWERS.items():
            self._marked = self._marked.replace(comment, tag)
        told = chat.thoughts.enable_thinking
        self._told: dict[str, bool] = {} if told is None else {"enable_thinking": told}
        self._processor = _Processor(tokenizer)
        self._processor.chat_template = chat.template
        for kind in ("image", "video", "audio"):
            setattr(self._processor, f"{kind}_token", dict(chat.tokens).get(kind))

    def judge(self, conversation: DrawnConversation) -> Judged:
        """Return the ids of a conversation, and which of them the template with marks says are an assistant's."""
        output = self._apply(conversation, conversation.messages, self._marked, return_assistant_tokens_mask=True)
        assert self._ids(self._apply(conversation, conversation.messages, self._chat.template)) == self._ids(output)
        masks = output["assistant_masks"]
        if self._is_processor and not KNOWS_MASKS_WITH_MEDIA:
            return Judged(self._ids(output), None)
        return Judged(self._ids(output), [bool(mask) for mask in (masks[0] if isinstance(masks[0], list) else masks)])

    def prompt(self, conversation: DrawnConversation) -> list[int]:
        """Return the ids before the last answer, with the prompt for it."""
        last = max(i for i, message in enumerate(conversation.messages) if message["role"] == "assistant")
        messages = conversation.messages[:last]
        return self._ids(self._apply(conversation, messages, self._chat.template, add_generation_prompt=True))

    def _apply(
        self, conversation: DrawnConversation, messages: list[dict[str, Any]], template: str, **options: bool
    ) -> Any:
        if not self._is_processor:
            return self._tokenizer.apply_chat_template(
                messages, tools=conversation.tools, chat_template=template, return_dict=True, **self._told, **options
            )
        self._processor.texts = {}
        for kind, features in conversation.media:
            token = self._chat.tokens[kind]
            written = self._chat.write(kind, features) if self._chat.write else token * total_features(features)
            self._processor.texts.setdefault(kind, []).append(written)
        return self._processor.apply_chat_template(
            [dict(message) for message in messages],
            tools=conversation.tools,
            chat_template=template,
            tokenize=True,
            return_dict=True,
            **self._told,
            **options,
        )

    @staticmethod
    def _ids(output: Any) -> list[int]:
        ids = output["input_ids"]
        return list(ids[0] if isinstance(ids[0], list) else ids)


@contextmanager
def chat_judge(folder: Path, name: str, tokenizers: dict[tuple[str, ...], Any]) -> Iterator[ChatJudge]:
    """Yield the judge of a family's folder.

    tokenizers: those that are open, which families share where transformers treats them alike: opening one takes
        seconds. Llama 2's and Qwen3.5's are treated by family.
    """
    chat = CHAT_FAMILIES[name]
    is_alone = chat.vocabulary == "llama2" or chat.family.startswith("qwen3_5")
    key = (name,) if is_alone else (chat.vocabulary,)
    if key not in tokenizers:
        tokenizers[key] = AutoTokenizer.from_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda: TEMPLATE_DATE))
        yield ChatJudge(chat, tokenizers[key])
