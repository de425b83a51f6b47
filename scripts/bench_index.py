"""What it costs to index a large LLaVA-format file, to read the index again, and to find a far step.

    python scripts/bench_index.py --folder DIR [--samples 1200000] [--format webdataset]

Writes that many samples with an image each into DIR: hard links to a few small pictures, so that every sample has a
path of its own to open and look at; or the same pictures in a tar shard, or in a Parquet file. Seconds are processor
seconds of all threads and processes together, beside those by the clock; memory is the most that the process has held
(call it again for that of reading alone).
"""

import argparse
import io
import json
import os
import platform
import resource
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from PIL import Image

from mmtrain.balance import Grouping
from mmtrain.data import GroupStream, build_index
from mmtrain.data.synthetic.demo import train_tokenizer
from mmtrain.recipe.schema import Recipe

NUM_PICTURES = 64  # of each format; file systems allow some 65,000 links to one file
PER_FOLDER = 10_000
ROWS = 200  # of one row group
WANTED = 20_000  # samples a second and core
WORDS = (
    "the a chart shows how many people live in each city what colour is largest bar left right please answer shortly"
)
T = TypeVar("T")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR", help="where samples are, or are written")
    parser.add_argument("--samples", type=int, default=1_200_000)
    parser.add_argument("--format", choices=["json", "webdataset", "parquet"], default="json")
    options = parser.parse_args()
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} x {platform.machine()}, Python {platform.python_version()}")
    recipe = write(options.folder, options.samples)
    if options.format != "json":
        recipe = packed(recipe, options.folder, options.format)
    for name in ("first", "again"):
        cpu, clock, index = timed(lambda: build_index(recipe))
        rate = options.samples / cpu
        print(
            f"{name}: {cpu:.1f} s of processor time, {clock:.1f} s by the clock; {rate:,.0f} samples a second and core "
            f"(wanted {WANTED:,}); {peak_gib():.2f} GiB at most, {len(index.samples)} samples"
        )
    for global_batch in (8, 512):
        grouping = Grouping.of(recipe.data, global_batch)
        cpu, _, stream = timed(lambda g=grouping: GroupStream(index.lengths, g, 0, index.weights))
        far, _, _ = timed(lambda s=stream, b=global_batch: s.groups(10**6 * b, b))
        near, _, _ = timed(lambda s=stream, b=global_batch: s.groups(10**6 * b + b, b))
        print(
            f"global batch {global_batch}: the stream starts in {cpu:.2f} s, step 1,000,000 is found in "
            f"{far * 1e3:.0f} ms, the next one in {near * 1e3:.2f} ms"
        )


def write(folder: Path, num: int) -> Recipe:
    """Write the samples, unless they are there, and a recipe that reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    file, tokenizer = folder / f"samples-{num}.json", folder / "tokenizer.json"
    if not file.exists():
        rng = np.random.default_rng(0)
        pictures = _pictures(folder, rng)
        texts = [" ".join(rng.choice(WORDS.split(), rng.integers(5, 40))) for _ in range(2000)]
        entries = []
        for i in range(num):
            source = pictures[i % len(pictures)]
            path = folder / str(i // PER_FOLDER) / f"{i}{source.suffix}"
            if i % PER_FOLDER == 0:
                path.parent.mkdir(exist_ok=True)
            if not path.exists():
                os.link(source, path)
            question, answer = texts[i % 1999], texts[i % 1997]
            turns = [{"from": "human", "value": f"<image>\n{question} {i}"}, {"from": "gpt", "value": answer}]
            entries.append({"id": str(i), "image": f"{i // PER_FOLDER}/{path.name}", "conversations": turns})
        train_tokenizer(iter(texts)).save(str(tokenizer))
        file.write_text(json.dumps(entries))
    return Recipe.model_validate(
        {
            "name": "bench",
            "model": {
                "vision": {"layers": 1, "hidden": 64, "heads": 4, "ffn": 64, "merge": 2, "downsample": "pixel_shuffle"},
                "llm": {"layers": 1, "hidden": 64, "heads": 4, "ffn": 64, "vocab": 1024},
            },
            "data": {"sources": [{"path": file}], "tokenizer": tokenizer, "seq_len": 4096},
            "train": {"steps": 1, "global_batch": 8, "optimizer": {"lr": 1e-3}},
        }
    )


def packed(recipe: Recipe, folder: Path, form: str) -> Recipe:
    """The samples of a recipe's file in another format, unless they are there, and a recipe that reads that."""
    source = recipe.data.sources[0].path
    path = folder / f"{source.stem}.{'tar' if form == 'webdataset' else 'parquet'}"
    if not path.exists():
        entries = json.loads(source.read_text())
        (_write_tar if form == "webdataset" else _write_parquet)(path, folder, entries)
    made = recipe.model_dump()
    made["data"]["sources"] = [{"path": path}]
    return Recipe.model_validate(made)


def _write_tar(path: Path, folder: Path, entries: list[dict[str, Any]]) -> None:
    with tarfile.open(path, "w") as archive:
        for entry in entries:
            image = folder / entry.pop("image")
            for suffix, content in ((".json", json.dumps(entry).encode()), (image.suffix, image.read_bytes())):
                member = tarfile.TarInfo(entry["id"] + suffix)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def _write_parquet(path: Path, folder: Path, entries: list[dict[str, Any]]) -> None:
    columns: dict[str, list[Any]] = {key: [entry[key] for entry in entries] for key in ("id", "conversations")}
    columns["image"] = [(folder / entry["image"]).read_bytes() for entry in entries]
    pyarrow.parquet.write_table(pa.table(columns), path, row_group_size=ROWS, use_dictionary=False)


def _pictures(folder: Path, rng: np.random.Generator) -> list[Path]:
    (folder / "pictures").mkdir(exist_ok=True)
    made = []
    for i in range(NUM_PICTURES):
        width, height = rng.integers(24, 96, 2).tolist()
        pixels = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        for suffix in (".jpg", ".png"):
            made.append(folder / "pictures" / f"{i}{suffix}")
            pixels.save(made[-1])
    return made


def timed(work: Callable[[], T]) -> tuple[float, float, T]:
    """Processor seconds, children's included, and seconds by the clock."""
    cpu, clock = _processor_s(), time.perf_counter()
    result = work()
    return _processor_s() - cpu, time.perf_counter() - clock, result


def _processor_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()
