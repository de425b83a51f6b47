r"""List the layouts of conversations in data files: which keys an entry of each has.

| keys | what they hold | where it is customary |
|---|---|---|
| conversations, messages, conversation | a list of turns, or of questions with answers | LLaVA, OpenAI, ShareGPT |
| instruction, output; input | a question, what it is about, and its answer | alpaca |
| query, response; history | a question and its answer; the pairs of both before | ms-swift |
| prompt, completion | a question and its answer, or lists of turns | TRL |
| texts; text_list, image_info | pairs, or a document with images | FineVision, OBELICS; MMC4 |
| caption, text, txt | a caption, or plain text | LAION; pretraining |

`system`, `tools` and media stand beside them. Pairs of a better and a worse answer are no conversation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mmtrain.data.formats.column_paths import ColumnPaths
from mmtrain.data.formats.sample import AUDIO_MARK, IMAGE_MARK, VIDEO_MARK, Role

# Value of a source's `format` -> keys under which an entry may hold its turns.
CONVERSATION_KEYS_BY_FORMAT = {"llava": ("conversations",), "messages": ("messages",)}
CONVERSATION_KEYS = ("conversations", "messages", "conversation")
MARK_BY_MEDIA_KIND = {"image": IMAGE_MARK, "audio": AUDIO_MARK, "video": VIDEO_MARK}
MEDIA_KIND_BY_KEY = {key: kind for kind in MARK_BY_MEDIA_KIND for key in (kind, f"{kind}s")}
PAIRS_KEY = "texts"  # a list of questions and answers; or of the texts of a document, null where an image stands
SENTENCES_KEY, MATCHES_KEY = "text_list", "image_info"  # of a document of MMC4
CAPTION_KEYS = ("caption", "text", "txt")
ROLES: dict[str, Role] = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response", "ipython"), "tool"),
    **dict.fromkeys(("gpt", "assistant", "function_call", "chatgpt", "bot", "model", "bard", "bing"), "assistant"),
}


@dataclass(frozen=True)
class EntryLayout:
    """One way in which entries hold a conversation: `keys` are those that an entry needs, `more` those it may have."""

    keys: tuple[str, ...]
    what: str  # for messages: what the keys hold
    more: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """The keys, for messages."""
        return " with ".join(f"`{key}`" for key in self.keys)


# Of several that an entry has the first holds.
LAYOUTS = (
    *(EntryLayout((key,), "a list of turns") for key in CONVERSATION_KEYS),
    EntryLayout((PAIRS_KEY,), "a list of questions with answers, or of a document's texts"),
    EntryLayout((SENTENCES_KEY, MATCHES_KEY), "lists of a document's texts and images"),
    EntryLayout(("instruction", "output"), "texts", ("input", "history")),
    EntryLayout(("query", "response"), "texts", ("history",)),
    EntryLayout(("prompt", "completion"), "texts or lists of turns"),
    *(EntryLayout((key,), "a text") for key in CAPTION_KEYS),
)
LAYOUT_KEYS = tuple(dict.fromkeys(key for layout in LAYOUTS for key in (*layout.keys, *layout.more)))
LIST_KEYS = (*CONVERSATION_KEYS, PAIRS_KEY, "history")  # which hold lists, in a Parquet file perhaps as JSON


@dataclass(frozen=True)
class EntryFormat:
    """How the entries of a source are read: under which keys turns may be, and which keys of the data are ours."""

    keys: tuple[str, ...] = CONVERSATION_KEYS  # all of them: any layout
    columns: ColumnPaths = field(default_factory=lambda: ColumnPaths({}))

    @cached_property
    def layouts(self) -> Sequence[EntryLayout]:
        """The layouts that entries may have, those of the source's `columns` first."""
        if self.keys != CONVERSATION_KEYS:
            return [layout for layout in LAYOUTS if layout.keys[0] in self.keys]
        named = self.columns.columns
        return sorted(LAYOUTS, key=lambda layout: not any(key in named for key in layout.keys))

    def find_layout(self, entry: Mapping[str, Any]) -> EntryLayout | None:
        """Return the layout of an entry. A list of turns that is null counts where there is nothing else."""
        layouts = self.layouts
        full = (layout for layout in layouts if all(entry.get(key) is not None for key in layout.keys))
        null = (layout for layout in layouts if all(key in entry for key in layout.keys))
        return next(full, None) or next(null, None)

    def chooses_answer(self) -> bool:
        """Return whether the source's `columns` say which keys hold what is learned."""
        return any(key in LAYOUT_KEYS for key in self.columns.columns)


ANY_FORMAT = EntryFormat()
