"""Measure how long it takes to index a large LLaVA-format file, to read the cached index, and to find a far step.

    python -m scripts.bench_index --folder DIR [--samples 1200000] [--format webdataset]

Writes that many samples with an image each into DIR: hard links to a few small images, so that every sample has a path
of its own to open; or the same images in a tar shard, or in a Parquet file. Prints processor seconds of all threads and
processes together, wall-clock seconds, and the peak memory of the process (run it again for the peak of reading alone).
"""

import io
import json
import os
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
from mmtrain.recipe.settings.schema import Recipe
from scripts.measurements import arguments, children_s, start

NUM_IMAGES = 64  # of each format; file systems allow about 65,000 links to one file
FILES_PER_FOLDER = 10_000
ROWS_PER_GROUP = 200
TARGET_SAMPLES_PER_S = 20_000  # of one core
WORDS = (
    "the a chart shows how many people live in each city what colour is largest bar left right please answer shortly"
)
T = TypeVar("T")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR", help="where samples are, or are written")
    parser.add_argument("--samples", type=int, default=1_200_000)
    parser.add_argument("--format", choices=["json", "webdataset", "parquet"], default="json")
    options = parser.parse_args()
    recipe = write_samples(options.folder, options.samples)
    if options.format != "json":
        recipe = repack(recipe, options.folder, options.format)
    report = start("Indexing", options)
    report.targets()
    for name in ("first", "again"):
        cpu_s, wall_s, index = timed(lambda: build_index(recipe))
        label = f"{len(index.samples):,} samples, {name}"
        rate = options.samples / cpu_s
        report.target(f"{label}: samples per second and core", rate, TARGET_SAMPLES_PER_S, at_least=True)
        report.figure(f"{label}: by the clock, peak memory", f"{wall_s:.1f} s, {peak_gib():.2f} GiB")
    for global_batch in (8, 512):
        grouping = Grouping.of(recipe.data, global_batch)
        start_s, _, stream = timed(lambda g=grouping: GroupStream(index.lengths, g, 0, index.weights))
        far_s, _, _ = timed(lambda s=stream, b=global_batch: s.groups(10**6 * b, b))
        next_s, _, _ = timed(lambda s=stream, b=global_batch: s.groups(10**6 * b + b, b))
        figures = f"{start_s:.2f} s / {far_s * 1e3:.0f} ms / {next_s * 1e3:.2f} ms"
        report.figure(f"global batch {global_batch}: the stream starts / step 1,000,000 is found / the next", figures)


def write_samples(folder: Path, num_samples: int) -> Recipe:
    """Write the samples, unless they exist, and return a recipe that reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"samples-{num_samples}.json"
    tokenizer = folder / "tokenizer.json"
    if not file.exists():
        rng = np.random.default_rng(0)
        images = _write_images(folder, rng)
        texts = [" ".join(rng.choice(WORDS.split(), rng.integers(5, 40))) for _ in range(2000)]
        entries = []
        for i in range(num_samples):
            image = images[i % len(images)]
            path = folder / str(i // FILES_PER_FOLDER) / f"{i}{image.suffix}"
            if i % FILES_PER_FOLDER == 0:
                path.parent.mkdir(exist_ok=True)
            if not path.exists():
                os.link(image, path)
            question = texts[i % 1999]
            answer = texts[i % 1997]
            turns = [{"from": "human", "value": f"<image>\n{question} {i}"}, {"from": "gpt", "value": answer}]
            entries.append({"id": str(i), "image": f"{i // FILES_PER_FOLDER}/{path.name}", "conversations": turns})
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


def repack(recipe: Recipe, folder: Path, form: str) -> Recipe:
    """Write the samples in another format, unless they exist, and return a recipe that reads them."""
    source = recipe.data.sources[0].path
    path = folder / f"{source.stem}.{'tar' if form == 'webdataset' else 'parquet'}"
    if not path.exists():
        entries = json.loads(source.read_text())
        write = _write_tar if form == "webdataset" else _write_parquet
        write(path, folder, entries)
    settings = recipe.model_dump()
    settings["data"]["sources"] = [{"path": path}]
    return Recipe.model_validate(settings)


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
    pyarrow.parquet.write_table(pa.table(columns), path, row_group_size=ROWS_PER_GROUP, use_dictionary=False)


def _write_images(folder: Path, rng: np.random.Generator) -> list[Path]:
    (folder / "pictures").mkdir(exist_ok=True)
    paths = []
    for i in range(NUM_IMAGES):
        width, height = rng.integers(24, 96, 2).tolist()
        pixels = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        for suffix in (".jpg", ".png"):
            path = folder / "pictures" / f"{i}{suffix}"
            pixels.save(path)
            paths.append(path)
    return paths


def timed(work: Callable[[], T]) -> tuple[float, float, T]:
    """Run `work`; return its processor seconds, children included, its wall-clock seconds, and its result."""
    start_cpu_s = time.process_time() + children_s()
    start_s = time.perf_counter()
    result = work()
    return time.process_time() + children_s() - start_cpu_s, time.perf_counter() - start_s, result


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()
