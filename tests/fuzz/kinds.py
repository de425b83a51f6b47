"""What is fuzzed: for each kind of foreign file, how a round makes one from a seed, and what reads it."""

import contextlib
import io
import json
import random
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from PIL import Image

from mmtrain.api.simulated_steps import simulate_source
from mmtrain.checkpoint import open_newest_good
from mmtrain.costs import CostTable
from mmtrain.data import build_index
from mmtrain.data.formats.sample import QUARANTINE_REASONS
from mmtrain.data.index.data_check import check_sources
from mmtrain.errors import MmtrainError
from mmtrain.planning import load_plan
from mmtrain.recipe.settings.data_settings import SourceSettings
from mmtrain.recipe.settings.schema import Recipe
from mmtrain.system_errors import system_errors_named
from tests.data.model_folders import FAMILIES, write_folder
from tests.data.rows import row
from tests.fuzz.mutations import JSON_VALUES, mutate, mutate_bytes

Check = Callable[[int], None]  # of a seed; raises whatever is neither a result nor an error with a message
TAGGED = Path(__file__).parents[1] / "compatibility" / "0.1.0"
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
SOUNDS = ("WAV", "FLAC", "OGG", "MP3")
VIDEOS = {"mp4": "mpeg4", "mkv": "mpeg4", "avi": "mpeg4", "webm": "libvpx"}
TURNS = [{"from": "human", "value": "<image>why"}, {"from": "gpt", "value": "red"}]


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Pass over errors with a message, as the command line does."""
    with contextlib.suppress(MmtrainError), system_errors_named():
        yield


def pictures(folder: Path) -> Check:
    """Fuzz images in files of their own, through `mmtrain data check`."""
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8))
    contents = [_saved(image, form) for form in FORMATS] + [_saved(image.convert(mode), "PNG") for mode in "LP1"]
    return _media_check(folder, contents, "image")


def sound(folder: Path) -> Check:
    """Fuzz clips."""
    import soundfile

    wave = np.random.default_rng(0).uniform(-0.5, 0.5, 4000).astype(np.float32)
    contents = []
    for form in SOUNDS:
        with io.BytesIO() as file:
            soundfile.write(file, wave, 16000, format=form)
            contents.append(file.getvalue())
    return _media_check(folder, contents, "audio")


def video(folder: Path) -> Check:
    """Fuzz videos."""
    import av

    contents = []
    for suffix, codec in VIDEOS.items():
        path = folder / f"whole.{suffix}"
        with av.open(str(path), "w") as container:
            stream: Any = container.add_stream(codec, rate=4)
            stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
            for number in range(8):
                pixels = np.full((32, 32, 3), number * 30, dtype=np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            container.mux(stream.encode())
        contents.append(path.read_bytes())
    return _media_check(folder, contents, "video")


def tar(folder: Path) -> Check:
    """Fuzz WebDataset shards."""
    rng = np.random.default_rng(0)
    image = _saved(Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)), "PNG")
    with io.BytesIO() as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for number in range(3):
                name = "ü" * 60 if number == 2 else str(number)  # with a header of pax
                text = json.dumps({"conversations": TURNS}).encode()
                for suffix, content in (("json", text), ("png", image)):
                    member = tarfile.TarInfo(f"{name}.{suffix}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
        whole = file.getvalue()
    return _source_check(folder / "rows.tar", lambda rng: mutate_bytes(whole, rng))


def parquet(folder: Path) -> Check:
    """Fuzz Parquet files."""
    image = _saved(Image.new("RGB", (8, 8)), "PNG")
    contents = []
    for options in ({}, {"compression": "zstd", "use_dictionary": False}, {"data_page_version": "2.0"}):
        columns = {"id": ["a", "b", "c"], "conversations": [TURNS] * 3, "image": [{"bytes": image, "path": None}] * 3}
        with io.BytesIO() as file:
            pyarrow.parquet.write_table(pa.table(columns), file, row_group_size=2, **options)
            contents.append(file.getvalue())
    return _source_check(folder / "rows.parquet", lambda rng: mutate_bytes(rng.choice(contents), rng))


TEMPLATE_PIECES = (
    *("{% for m in messages %}", "{% endfor %}", "{{ m.role }}", "{{ m.content }}", "{% if m.role == 'user' %}"),
    *("{% endif %}", "{% else %}", "{% if add_generation_prompt %}", "<|im_start|>", "<|im_end|>", "\n", "{{ m }}"),
    *("{% for a in range(100000) %}", "{{ 'x' * 1000000000 }}", "{{ 10 ** 1000000 }}", "{{ messages * 100000 }}"),
    *("{% set ns = namespace(a=[0]) %}", "{% set ns.a = ns.a + ns.a %}", "{{ m.content | tojson }}", "{{ m['content'"),
    *("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ raise_exception('no') }}", "{{ '%s' % messages }}"),
    *("{{ messages | map('upper') | list }}", "{{ ''.__class__ }}", "{% include 'x' %}", "{% break %}"),
    *("{{ '{:>1000000000}'.format('x') }}", "{{ m.content | center(1000000000) }}", "{% generation %}"),
    *(
        "{% endgeneration %}",
        "{{ eos_token }}",
        "{{ bos_token }}",
        "{{ loop.index }}",
        "{% raw %}",
        "{# ",
        "\0",
        "\ud7ff",
    ),
    *("{{ m.content | indent(100000000) }}", "{{ m.content | wordwrap(1) }}", "{{ 'a' | batch(2) | list }}"),
)


def templates(folder: Path) -> Check:
    """Fuzz chat templates, through the index of a row."""
    whole = FAMILIES["qwen2"].template
    model = write_folder(folder / "model", FAMILIES["qwen2"])
    config = json.loads((model / "tokenizer_config.json").read_text())
    data = folder / "rows.json"
    data.write_text(json.dumps([row("why", "red")]))
    recipe = _recipe(data, model)

    def check(seed: int) -> None:
        rng = random.Random(seed)
        if rng.random() < 0.5:
            source = "".join(rng.choice(TEMPLATE_PIECES) for _ in range(rng.randrange(12)))
        else:
            place = rng.randrange(len(whole))
            source = whole[:place] + rng.choice(TEMPLATE_PIECES) + whole[place + rng.choice((0, 0, 1, 10)) :]
        (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": source}))
        with refused():
            build_index(recipe)

    return check


def plans(folder: Path) -> Check:
    """Fuzz plans, through `mmtrain simulate`."""
    shutil.copytree(TAGGED, folder / "tagged")
    whole = json.loads((TAGGED / "plan.json").read_text())
    recipe, path = folder / "tagged" / "recipe.yaml", folder / "plan.json"

    def check(seed: int) -> None:
        rng = random.Random(seed)
        _write_mutated(path, whole, rng)
        with refused():
            load_plan(path)
            simulate_source(recipe, [], path, None, 1, None)

    return check


def tables(folder: Path) -> Check:
    """Fuzz tables of measured costs."""
    whole = json.loads((TAGGED / "costs.json").read_text())
    path = folder / "costs.json"

    def check(seed: int) -> None:
        _write_mutated(path, whole, random.Random(seed))
        with refused():
            CostTable.load(path)

    return check


def checkpoints(folder: Path) -> Check:
    """Fuzz the files of a checkpoint."""
    root = folder / "checkpoints"

    def check(seed: int) -> None:
        rng = random.Random(seed)
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(TAGGED / "checkpoints", root)
        (step,) = root.glob("step-*")
        path = rng.choice([root / "latest", *sorted(step.iterdir())])
        path.write_bytes(mutate_bytes(path.read_bytes(), rng))
        with refused():
            open_newest_good(root, lambda _: None)

    return check


def _write_mutated(path: Path, whole: Any, rng: random.Random) -> None:
    content = whole
    values = [*JSON_VALUES, *_leaves(whole)] if rng.random() < 0.3 else _leaves(whole)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        content = mutate(content, rng, values)
    text = json.dumps(content).encode("utf-8", "surrogatepass")
    path.write_bytes(mutate_bytes(text, rng) if rng.random() < 0.1 else text)


def _leaves(value: Any) -> list[Any]:
    """Return the texts and numbers inside of a JSON value, and numbers beside them."""
    if isinstance(value, dict):
        return [leaf for inner in value.values() for leaf in _leaves(inner)]
    if isinstance(value, list):
        return [leaf for inner in value for leaf in _leaves(inner)]
    return [value, value + 1, 2 * value] if type(value) in (int, float) else [value]


def _saved(image: Image.Image, form: str) -> bytes:
    with io.BytesIO() as file:
        image.save(file, form)
        return file.getvalue()


def _media_check(folder: Path, contents: list[bytes], kind: str) -> Check:
    """Return a check of one medium in a file of its own."""
    data, path = folder / "rows.json", folder / "medium"
    turns = [{"from": "human", "value": f"<{kind}>why"}, {"from": "gpt", "value": "red"}]
    data.write_text(json.dumps([{"id": "1", kind: "medium", "conversations": turns}]))

    def check(seed: int) -> None:
        rng = random.Random(seed)
        path.write_bytes(mutate_bytes(rng.choice(contents), rng))
        _check_source(data)

    return check


def _source_check(path: Path, content: Callable[[random.Random], bytes]) -> Check:
    def check(seed: int) -> None:
        path.write_bytes(content(random.Random(seed)))
        _check_source(path)

    return check


def _check_source(path: Path) -> None:
    with refused():
        report = check_sources([SourceSettings(path=path)])
        assert {entry.kind for entry in report.bad} <= QUARANTINE_REASONS.keys()


def _recipe(data: Path, tokenizer: Path) -> Recipe:
    llm = {"layers": 1, "hidden": 8, "heads": 1, "ffn": 8, "vocab": 1024}
    train = {"steps": 1, "global_batch": 2, "optimizer": {"lr": 1e-3}}
    sources = {"sources": [{"path": data}], "tokenizer": tokenizer, "seq_len": 64, "max_bad_rate": 1.0}
    return Recipe.model_validate({"name": "t", "model": {"llm": llm}, "data": sources, "train": train})


KINDS: dict[str, Callable[[Path], Check]] = {
    "tar": tar,
    "parquet": parquet,
    "pictures": pictures,
    "sound": sound,
    "video": video,
    "templates": templates,
    "checkpoints": checkpoints,
    "plans": plans,
    "tables": tables,
}
