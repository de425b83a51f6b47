"""Every kind of unusable sample is planted, found, and listed in the documentation."""

import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
from PIL import Image
from tokenizers import Tokenizer

import mmtrain
from mmtrain.data.formats.sample import QUARANTINE_REASONS
from mmtrain.data.index.data_check import check_sources_for_recipe
from mmtrain.recipe.settings.data_settings import SourceSettings
from mmtrain.recipe.settings.modalities import AUDIO
from mmtrain.recipe.settings.schema import Recipe
from tests.data.archives import movie, parquet, png, tar, wav
from tests.data.rows import Row, row

MakeRecipe = Callable[..., Recipe]
AUDIO_UNIT = {"layers": 1, "hidden": 8, "heads": 1, "ffn": 8, "mel_bins": 16, "max_frames": 400}


def _noise(form: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(buffer, form)
    return buffer.getvalue()


def _sound(samples: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, 8000, format="WAV")
    return buffer.getvalue()


def _empty_movie() -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="avi") as container:
        stream = container.add_stream("mpeg4", rate=20)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        container.start_encoding()
    return buffer.getvalue()


def _broken_png() -> bytes:
    content = bytearray(_noise("png"))
    content[200:300] = bytes(100)
    return bytes(content)


MEDIA = {
    "good.png": lambda: png(),
    "good.wav": lambda: wav(),
    "good.mp4": lambda: movie(["red"], width=16, height=16),
    "text.bin": lambda: b"neither seen nor heard",
    "large.png": lambda: png("red", 100, 100),
    "narrow.png": lambda: png("red", 1, 201),
    "deep.pgm": lambda: b"P5 2 2 65535\n" + bytes(8),
    "cut.jpg": lambda: _noise("jpeg")[:-10],
    "broken.png": _broken_png,
    "empty.wav": lambda: _sound(np.zeros(0)),
    "long.wav": lambda: wav(5.0),
    "short.wav": lambda: wav(0.02),
    "wide.wav": lambda: _sound(np.zeros((16, 40))),
    "empty.avi": _empty_movie,
    "long.mp4": lambda: movie(["red"] * 10, width=16, height=16),  # 2 s
}


def _with(text: str, **media: Any) -> Row:
    return row(text, "a") | media


ROWS: dict[str, Row] = {
    "malformed": {},
    "tools": _with("hi", tools=[{"name": "f"}]),
    "preference": {"prompt": "hm?", "chosen": "a", "rejected": "b"},
    "no_answer": row("hm?", " "),
    "image_count": row("<image><image>", "a", "good.png"),
    "audio_count": _with("<audio><audio>", audio="good.wav"),
    "video_count": _with("<video><video>", video="good.mp4"),
    "target": {"conversations": [*_with("hi")["conversations"][:1], {"from": "gpt", "value": "a", "mask": 1}]},
    "too_many_images": _with("<video><image>", video="good.mp4", image="good.png"),
    "too_long": row("word " * 100, "a"),
    "image_path": row("<image>", "a", "../good.png"),
    "audio_path": _with("<audio>", audio="/good.wav"),
    "video_path": _with("<video>", video="link.mp4"),
    "image_url": row("<image>", "a", "data:image/png,AAAA"),
    "audio_url": _with("<audio>", audio="https://example.org/a.wav"),
    "video_url": _with("<video>", video="file:///good.mp4"),
    "missing_image": row("<image>", "a", "gone.png"),
    "missing_audio": _with("<audio>", audio="gone.wav"),
    "missing_video": _with("<video>", video="gone.mp4"),
    "not_an_image": row("<image>", "a", "text.bin"),
    "not_audio": _with("<audio>", audio="text.bin"),
    "not_a_video": _with("<video>", video="text.bin"),
    "empty_audio": _with("<audio>", audio="empty.wav"),
    "empty_video": _with("<video>", video="empty.avi"),
    "too_many_pixels": row("<image>", "a", "large.png"),
    "too_narrow": row("<image>", "a", "narrow.png"),
    "too_many_bits": row("<image>", "a", "deep.pgm"),
    "video_too_long": _with("<video>", video="long.mp4"),
    "clip_too_long": _with("<audio>", audio="long.wav"),
    "clip_too_short": _with("<audio>", audio="short.wav"),
    "audio_too_wide": _with("<audio>", audio="wide.wav"),
    "truncated": row("<image>", "a", "cut.jpg"),
    "undecodable": row("<image>", "a", "broken.png"),
}


def _hostile_tars(folder: Path) -> dict[str, str]:
    """Write shards, and return sample -> the kind of its fault."""
    import tarfile

    tar(
        folder / "limits.tar",
        {"big.txt": b"x" * 2000, "../up.txt": b"x", "fine.txt": b"x", "b.txt": b"y", "c.txt": b""},
    )
    with tarfile.open(folder / "links.tar", "w") as archive:
        link = tarfile.TarInfo("link.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    intact = tar(folder / "cut.tar", {"one.txt": b"x", "two.txt": b"x"}).read_bytes()
    (folder / "cut.tar").write_bytes(intact[:1600])
    return {
        "big": "tar_member_size",
        "../up": "tar_name",
        str(folder / "limits.tar"): "tar_too_many",
        "link": "tar_member",
        str(folder / "cut.tar"): "tar_broken",
    }


def _hostile_parquet(folder: Path) -> dict[str, str]:
    rng = np.random.default_rng(0)
    images = [rng.bytes(500), rng.bytes(2000), *(rng.bytes(500) for _ in range(4))]
    columns = {"caption": list("abcdef"), "image": images, "id": [f"p{i}" for i in range(6)]}
    parquet(folder / "x.parquet", columns, use_dictionary=False, compression="none")
    content = bytearray((folder / "x.parquet").read_bytes())
    page_start = content.index(images[2])
    content[page_start - 40 : page_start] = bytes(40)
    (folder / "x.parquet").write_bytes(content)
    path = str(folder / "x.parquet")
    return {
        "p0": "not_an_image",
        "p1": "parquet_cell_size",
        f"{path}:2": "parquet_broken",
        f"{path}:4": "parquet_too_many",
    }


@pytest.fixture
def planted(tmp_path: Path, recipe: MakeRecipe, tokenizer_path: Path) -> tuple[Recipe, dict[str, str]]:
    """Make a recipe whose sources hold every kind of bad sample; return it with the kind of each sample."""
    for name, make in MEDIA.items():
        (tmp_path / name).write_bytes(make())
    outside = tmp_path.parent / f"{tmp_path.name}-outside.mp4"
    outside.write_bytes(b"")
    os.symlink(outside, tmp_path / "link.mp4")
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    tokenizer.add_special_tokens([AUDIO.placeholder])
    tokenizer.save(str(tmp_path / "speech.json"))
    rows = [entry | {"id": kind} for kind, entry in ROWS.items()] + [row("<image>", "a", "good.png", name="good")]
    expected = {kind: kind for kind in ROWS} | _hostile_tars(tmp_path) | _hostile_parquet(tmp_path)
    names = ("train.json", "limits.tar", "links.tar", "cut.tar", "x.parquet")
    made = recipe(
        rows,
        tokenizer=tmp_path / "speech.json",
        sources=[{"path": tmp_path / name} for name in names],
        max_images=4,
        video={"max_frames": 4, "max_seconds": 1.0},
        image={"min_pixels": 64, "max_pixels": 1024, "max_source_pixels": 5000},
        audio={"max_seconds": 4.0},
        limits={"max_member_bytes": 1000, "max_members": 4},
    ).model_dump()
    made["model"]["audio"] = AUDIO_UNIT | {"clip_end": "silence", "downsample": 4}
    return Recipe.model_validate(made), expected


def test_every_planted_fault_is_found_with_its_kind(planted: tuple[Recipe, dict[str, str]]) -> None:
    made, expected = planted
    report = check_sources_for_recipe(made, made.data.sources)
    named = {
        q: q.id if not q.kind.startswith("parquet_") or q.id[0] == "p" else f"{q.id}:{q.index}" for q in report.bad
    }
    assert {name: q.kind for q, name in named.items()} == expected
    assert len(report.bad) == len(expected)
    sources = {str(source.path) for source in made.data.sources}
    assert {q.source for q in report.bad} == sources
    assert all(len(q.reason) > 10 for q in report.bad)
    text_only = made.model_copy(update={"model": made.model.model_copy(update={"vision": None, "audio": None})})
    rows = [_with("<image>", image="good.png", id="no_vision"), _with("<audio>", audio="good.wav", id="no_audio")]
    rows.append({"conversations": [{"from": "human", "value": "draw"}, {"from": "gpt", "value": "<image>"}]})
    rows[-1] |= {"image": "good.png", "id": "no_generator"}
    path = made.data.sources[0].path.with_name("text.json")
    path.write_text(json.dumps(rows))
    assert {q.kind for q in check_sources_for_recipe(text_only, [SourceSettings(path=path)]).bad} == {
        "no_vision",
        "no_audio",
        "no_generator",
    }
    # By workers, by tokenizers with a template, in sources of captions to draw, and without PyAV.
    found_elsewhere = {"deadly", "unreadable", "chat_template", "no_caption", "audio_length"}
    assert {*expected.values(), "no_vision", "no_audio", "no_generator"} | found_elsewhere == set(QUARANTINE_REASONS)


def test_every_kind_that_the_code_raises_is_registered() -> None:
    folder = Path(mmtrain.__file__).parent / "data"
    calls = r'(?:Error|BadTarMember|Quarantined|Quarantined\.of)\([^")]*"([a-z_]+)"|_open_\w+\(media, "([a-z_]+)"'
    raised = [match for path in folder.rglob("*.py") for match in re.findall(calls, path.read_text())]
    raised_kinds = {kind for match in raised for kind in match if kind}
    assert {"malformed", "truncated", "tar_name", "not_audio", "too_long"} <= raised_kinds
    assert raised_kinds <= set(QUARANTINE_REASONS)


def test_the_documentation_lists_them_all() -> None:
    page = (Path(mmtrain.__file__).parents[1] / "docs" / "data.md").read_text()
    table = page.partition("| kind | why |")[2]
    assert dict(re.findall(r"^\| `([a-z_]+)` \| (.*) \|$", table, re.M)) == QUARANTINE_REASONS
