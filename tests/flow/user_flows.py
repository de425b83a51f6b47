"""Runs as users start them on a node of eight cores: families, formats of data and placements, at their defaults.

`FLOWS` is fixed: of all combinations those that together show the most pairs of values, as in `tests.flow.cells`.
`python -m tests.flow.user_flows` prints them, and which pairs they leave out.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import yaml

from mmtrain.data.synthetic.demo import DEMO_VOCAB_SIZE, generate_demo
from mmtrain.families import FAMILIES
from mmtrain.recipe.settings.modalities import MODALITIES
from mmtrain.weights.tiny_model import CONVERSATIONS_FOLDER, write_tiny_model
from tests.data.archives import movie, parquet, tar

NUM_FLOWS = 18  # and one through a producer
NUM_SAMPLES = 40
NUM_VIDEOS = 4
ROWS_PER_GROUP = 16  # of Parquet and Arrow files: media of several groups are read
FROM_SCRATCH = "from scratch"  # a recipe with sizes, a tokenizer file and mmtrain's own chat format
PLACEMENTS = ("auto", "unified", "disaggregated", "colocated", "replicated")
TAKING_VIDEOS = {
    *("glm4v_moe", "internvl", "llava_onevision"),
    *("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "qwen3_vl", "qwen3_vl_moe"),
    *("qwen3_5", "qwen3_5_moe"),
}
# What a user must write, and nothing else.
MODEL_FROM_SCRATCH = {
    "vision": {"layers": 1, "hidden": 32, "heads": 2, "ffn": 64},
    "llm": {"layers": 2, "hidden": 32, "heads": 2, "ffn": 64, "vocab": DEMO_VOCAB_SIZE},
}
TRAIN = {"steps": 2, "global_batch": 4, "optimizer": {"lr": 1e-3}}
# Above the largest image that the defaults of `data.image` allow, and above a short video of Qwen2.5-Omni (854 tokens).
SEQ_LEN = 1088

WITH_TOWERS_ASIDE = {"smolvlm"}  # trained on texts, from a folder with towers
_MARK = re.compile("<(image|audio|video)>")


@dataclass(frozen=True)
class Flow:
    """One combination; with `producer` a process of its own prepares the steps."""

    family: str
    format: str
    placement: str
    producer: bool = False

    def __str__(self) -> str:
        return f"{self.family}, {self.format}, {self.placement}" + ", through a producer" * self.producer

    @property
    def values(self) -> dict[str, str]:
        """The value of each axis."""
        return {"family": self.family, "format": self.format, "placement": self.placement}

    @property
    def pairs(self) -> tuple[tuple[object, ...], ...]:
        """The pairs of values that the flow shows."""
        return tuple(combinations(self.values.items(), 2))


@dataclass(frozen=True)
class Conversation:
    """A sample in no format in particular: texts with marks, and the media in their order."""

    turns: tuple[tuple[str, str], ...]  # (role, text)
    media: tuple[tuple[str, Path], ...]  # (kind, file)

    @property
    def messages(self) -> list[dict[str, str]]:
        """Turns in the layout of `messages`."""
        return [{"role": role, "content": text} for role, text in self.turns]

    def named(self, name: Callable[[Path], object]) -> dict[str, list[object]]:
        """Return the media by the key of their kind, each as `name` makes it."""
        keys = {"image": "images", "audio": "audios", "video": "videos"}
        named = {key: [name(path) for kind, path in self.media if kind == of] for of, key in keys.items()}
        return {key: entries for key, entries in named.items() if entries}


# Formats: each writes conversations into a folder and returns the path of the source ------------------------------


def _write_llava(folder: Path, conversations: Sequence[Conversation]) -> Path:
    names = {"user": "human", "assistant": "gpt"}
    rows = [
        {"conversations": [{"from": names[role], "value": text} for role, text in conversation.turns]}
        | conversation.named(lambda path: str(path.relative_to(folder)))
        for conversation in conversations
    ]
    (folder / "mine.json").write_text(json.dumps(rows), encoding="utf-8")
    return folder / "mine.json"


def _write_messages(folder: Path, conversations: Sequence[Conversation]) -> Path:
    """Write JSON lines whose contents are lists of parts."""
    lines = []
    for conversation in conversations:
        files = (path.relative_to(folder) for _, path in conversation.media)
        messages = []
        for role, text in conversation.turns:
            parts: list[dict[str, str]] = []
            for number, piece in enumerate(_MARK.split(text)):
                if number % 2:
                    parts.append({"type": piece, piece: str(next(files))})
                elif piece:
                    parts.append({"type": "text", "text": piece})
            messages.append({"role": role, "content": parts})
        lines.append(json.dumps({"messages": messages}) + "\n")
    (folder / "mine.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder / "mine.jsonl"


def _members(conversations: Sequence[Conversation]) -> Iterator[tuple[str, bytes]]:
    for number, conversation in enumerate(conversations):
        names = {path: f"{number:05d}.{i}{path.suffix}" for i, (_, path) in enumerate(conversation.media)}
        entry = {"messages": conversation.messages, **conversation.named(lambda path, names=names: names[path])}
        yield f"{number:05d}.json", json.dumps(entry).encode()
        yield from ((name, path.read_bytes()) for path, name in names.items())


def _write_webdataset(folder: Path, conversations: Sequence[Conversation]) -> Path:
    half = len(conversations) // 2
    for number, shard in enumerate((conversations[:half], conversations[half:])):
        tar(folder / f"mine-{number}.tar", dict(_members(shard)))
    return folder / "mine-{0..1}.tar"


def _write_energon(folder: Path, conversations: Sequence[Conversation]) -> Path:
    meta = folder / "energon" / ".nv-meta"
    meta.mkdir(parents=True)
    tar(meta.parent / "0.tar", dict(_members(conversations)))
    (meta / "split.yaml").write_text(yaml.safe_dump({"split_parts": {"train": ["0.tar"]}, "exclude": []}))
    (meta / "dataset.yaml").write_text("__module__: megatron.energon\n__class__: CrudeWebdataset\n")
    return meta.parent


def _columns(conversations: Sequence[Conversation]) -> dict[str, pa.Array]:
    """Return the columns of a table; media are structs as `datasets` writes them."""
    medium = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    turn = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    cells = [c.named(lambda path: {"bytes": path.read_bytes(), "path": path.name}) for c in conversations]
    keys = sorted({key for row in cells for key in row})
    columns = {key: pa.array([row.get(key, []) for row in cells], medium) for key in keys}
    return {"messages": pa.array([conversation.messages for conversation in conversations], turn), **columns}


def _write_parquet(folder: Path, conversations: Sequence[Conversation]) -> Path:
    return parquet(folder / "mine.parquet", _columns(conversations), ROWS_PER_GROUP)


def _write_datasets(folder: Path, conversations: Sequence[Conversation]) -> Path:
    saved = folder / "saved"
    saved.mkdir()
    table = pa.table(_columns(conversations))
    name = "data-00000-of-00001.arrow"
    with pa.OSFile(str(saved / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=ROWS_PER_GROUP)
    (saved / "dataset_info.json").write_text(json.dumps({"features": {}}))
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}], "_split": "train"}))
    return saved


FORMATS: dict[str, Callable[[Path, Sequence[Conversation]], Path]] = {
    "llava": _write_llava,
    "messages": _write_messages,
    "webdataset": _write_webdataset,
    "energon": _write_energon,
    "parquet": _write_parquet,
    "datasets": _write_datasets,
}


# Which flows run ---------------------------------------------------------------------------------------------------


def media_families() -> list[str]:
    """Return the published families whose tiny models take media, and a model from scratch."""
    with_media = [name for name, family in FAMILIES.items() if _encoders(family.tiny["config.json"])]
    published = [name for name in with_media if name not in WITH_TOWERS_ASIDE]
    return [*sorted(published), FROM_SCRATCH]


def _encoders(config: dict[str, Any]) -> list[str]:
    """Return the kinds of media that the config of a tiny model has an encoder for."""
    text = json.dumps(config)
    return [name for name in MODALITIES if f'"{name}_config"' in text]


def all_flows() -> list[Flow]:
    """Return all combinations that two ranks can run, on which no more than two units have ranks of their own."""
    return [
        flow
        for flow in map(Flow, *zip(*product(media_families(), FORMATS, PLACEMENTS), strict=True))
        if (flow.family, flow.placement) != ("qwen2_5_omni", "disaggregated")
    ]


def choose_flows(count: int) -> tuple[Flow, ...]:
    """Choose one flow after the other, each with the most new pairs and then with the values that are used least.

    A pair that was shown k times counts 0.125**k.
    """
    seen: Counter[tuple[object, ...]] = Counter()
    uses: Counter[tuple[str, str]] = Counter()  # of (axis, value)
    left = all_flows()
    chosen = []

    def gain(flow: Flow) -> tuple[float, int, int]:
        new_pairs = sum(0.125 ** seen[pair] for pair in flow.pairs)
        family, *others = flow.values.items()
        return new_pairs, -uses[family], -sum(uses[value] for value in others)

    for _ in range(count):
        best = max(left, key=gain)
        left.remove(best)
        seen.update(best.pairs)
        uses.update(best.values.items())
        chosen.append(best)
    return tuple(chosen)


FLOWS = (*choose_flows(NUM_FLOWS), Flow("qwen2_5_omni", "webdataset", "unified", producer=True))


# What they run -----------------------------------------------------------------------------------------------------


def write_flow(flow: Flow, folder: Path) -> Path:
    """Write model, data and recipe of a flow; return the recipe's file."""
    data: dict[str, object] = {"seq_len": SEQ_LEN}
    model: dict[str, object] = {"hf": "model"}
    conversations = folder / "model" / CONVERSATIONS_FOLDER
    if flow.family == FROM_SCRATCH:
        generate_demo(conversations, seed=0, train=NUM_SAMPLES, heldout=1)
        data["tokenizer"] = str(conversations / "tokenizer.json")
        model = MODEL_FROM_SCRATCH
    else:
        write_tiny_model(FAMILIES[flow.family], folder / "model", seed=0, num_train=NUM_SAMPLES)
    samples = list(_read_conversations(conversations))
    if flow.family in TAKING_VIDEOS:
        samples += _draw_videos(conversations)
    data["sources"] = [{"path": str(FORMATS[flow.format](conversations, samples))}]
    recipe: dict[str, object] = {"name": "flow", "model": model, "data": data, "train": TRAIN}
    if flow.placement != "auto":
        recipe["parallel"] = {"placement": flow.placement}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def _read_conversations(folder: Path) -> Iterator[Conversation]:
    """Read what a tiny model or the demo comes with, in either layout."""
    roles = {"human": "user", "gpt": "assistant"}
    for row in json.loads((folder / "train.json").read_text(encoding="utf-8")):
        if "messages" in row:
            turns = tuple((turn["role"], turn["content"]) for turn in row["messages"])
        else:
            turns = tuple((roles[turn["from"]], turn["value"]) for turn in row["conversations"])
        left = {
            "image": iter(row.get("images", row.get("image", ()))),
            "audio": iter(row.get("audios", row.get("audio", ()))),
        }
        kinds = [kind for _, text in turns for kind in _MARK.findall(text)]
        yield Conversation(turns, tuple((kind, folder / next(left[kind])) for kind in kinds))


def _draw_videos(folder: Path) -> Iterator[Conversation]:
    for number in range(NUM_VIDEOS):
        path = folder / f"video-{number}.mp4"
        path.write_bytes(movie(["red", "blue", "green"][: 1 + number % 3]))
        yield Conversation((("user", "<video>What is first?"), ("assistant", "red")), (("video", path),))


def main() -> None:
    """Print the flows and the pairs of values that they show, of those that there are."""
    for flow in FLOWS:
        print(flow)
    possible = {pair for flow in all_flows() for pair in flow.pairs}
    shown = {pair for flow in FLOWS for pair in flow.pairs}
    axes = Counter((left[0], right[0]) for left, right in possible)  # type: ignore[index]
    of_shown = Counter((left[0], right[0]) for left, right in shown)  # type: ignore[index]
    for pair, count in axes.items():
        print(f"{' x '.join(map(str, pair))}: {of_shown[pair]} of {count} pairs")


if __name__ == "__main__":
    main()
