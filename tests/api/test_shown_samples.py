"""`mmtrain data show`: what a sample becomes, for a family of each kind of data."""

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

import mmtrain as mm
from mmtrain.api.shown_samples import ShownSamples
from mmtrain.data import build_index, load_tokenizer
from mmtrain.data.loading.prepared_samples import PreparedSample, prepare_samples
from mmtrain.data.media.audio import HOP_SAMPLES, SAMPLE_RATE_HZ
from mmtrain.data.text.cut_samples import encode_kept
from mmtrain.errors import UserError
from mmtrain.families import FAMILIES
from mmtrain.recipe import Recipe, load_recipe
from mmtrain.report.shown_sample import token_runs
from mmtrain.weights.tiny_model import write_tiny_model

av = pytest.importorskip("av")
ANSWERS = ["An orange ball.\nIt moves right.", "186 pixels 🎈"]
RECIPE = """
name: shown
model: {{hf: {folder}}}
data:
  sources: [{{path: {data}}}]
  seq_len: 2048
  {more}
cluster: {{hardware: cpu-core}}
train: {{steps: 1, global_batch: 1, optimizer: {{lr: 1.0e-3}}}}
"""


@dataclass(frozen=True)
class Kind:
    """A family, and what its sample holds."""

    family: str
    mark: str = ""
    key: str = ""
    file: str = ""
    more: str = ""


KINDS = {
    "text": Kind("qwen2"),
    "image": Kind("llava", "<image>", "images", "p.png"),
    "video": Kind("qwen2_5_vl", "<video>", "videos", "v.mp4", "video: {fps: 2.0, max_frames: 8}"),
    "audio": Kind("qwen2_audio", "<audio>", "audios", "a.wav"),
}


def write_media(folder: Path) -> None:
    gradient = np.linspace(0, 255, 64).astype(np.uint8)
    pixels = np.stack([np.tile(gradient, (48, 1)), np.tile(gradient[:48, None], (1, 64)), np.full((48, 64), 90)], -1)
    Image.fromarray(pixels.astype(np.uint8)).save(folder / "p.png")
    seconds = np.arange(SAMPLE_RATE_HZ) / SAMPLE_RATE_HZ
    soundfile.write(folder / "a.wav", 0.5 * np.sin(2 * np.pi * 440 * seconds), SAMPLE_RATE_HZ)
    with av.open(str(folder / "v.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = 96, 64, "yuv420p", 2_000_000
        for number in range(16):
            frame = Image.new("RGB", (96, 64), (15 * number, 0, 0))
            for packet in stream.encode(av.VideoFrame.from_image(frame)):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write for each kind a tiny model, one sample, one that cannot be used, and a recipe."""
    root = tmp_path_factory.mktemp("shown")
    write_media(root)
    paths = {}
    for name, kind in KINDS.items():
        write_tiny_model(FAMILIES[kind.family], root / kind.family, seed=0, num_train=4)
        turns = [
            {"role": "user", "content": f"{kind.mark}What moves?"},
            {"role": "assistant", "content": ANSWERS[0]},
            {"role": "user", "content": "How far?"},
            {"role": "assistant", "content": ANSWERS[1]},
        ]
        media = {kind.key: [kind.file]} if kind.key else {}
        entries = [{"id": name, "messages": turns, **media}, {"id": "bad", "question": "?"}]
        (root / f"{name}.json").write_text(json.dumps(entries))
        paths[name] = root / f"{name}.yaml"
        settings = RECIPE.format(folder=root / kind.family, data=root / f"{name}.json", more=kind.more)
        paths[name].write_text(settings)
    return paths


def prepared(path: Path) -> tuple[Recipe, PreparedSample]:
    recipe = load_recipe(path).recipe
    [sample] = prepare_samples(recipe, recipe.data.sources, [0]).samples
    assert isinstance(sample, PreparedSample)
    return recipe, sample


@pytest.mark.parametrize("kind", KINDS)
def test_learned_is_every_answer_with_the_token_that_ends_it(recipes: dict[str, Path], kind: str) -> None:
    [sample] = mm.show_data(recipes[kind]).samples
    learned = ["".join(run.text for run in runs) for runs in _learned_spans(sample.tokens)]
    assert learned == [f"{answer}<|im_end|>" for answer in ANSWERS]
    assert sample.counts["of them learned"] == sum(token.is_learned for token in sample.tokens)


def _learned_spans(tokens: Any) -> list[list[Any]]:
    spans: list[list[Any]] = [[]]
    for run in token_runs(tokens):
        if run.is_learned:
            spans[-1].append(run)
        elif spans[-1]:
            spans.append([])
    return [span for span in spans if span]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_labels_are_those_of_the_index_that_trains(recipes: dict[str, Path], kind: str) -> None:
    recipe, sample = prepared(recipes[kind])
    index = build_index(recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_bad_rate": 1.0})}))
    tokenizer = load_tokenizer(recipe.data.tokenizer, recipe.model.hf)
    encoded = encode_kept(tokenizer, index.samples[0], index.media_features(0))
    assert [token.id for token in sample.tokens] == encoded.ids.tolist()
    after = [token.is_learned for token in sample.tokens[1:]]
    assert after == (encoded.labels[:-1] != -100).tolist()
    assert sample.num_tokens == index.lengths.tokens[0]
    assert sample.num_learned == index.lengths.targets[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_what_transformers_decodes(recipes: dict[str, Path], kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    recipe, sample = prepared(recipes[kind])
    judge = transformers.AutoTokenizer.from_pretrained(recipe.model.hf)
    ids = [token.id for token in sample.tokens if token.unit is None]
    assert "".join(token.spelled.text for token in sample.tokens) == judge.decode(ids)
    special = {token_id for token_id, token in judge.added_tokens_decoder.items() if token.special}
    assert all(token.spelled.is_special == (token.id in special) for token in sample.tokens if token.unit is None)


@pytest.mark.slow
def test_a_picture_is_shown_as_the_processor_resizes_it(recipes: dict[str, Path]) -> None:
    transformers = pytest.importorskip("transformers")
    [sample] = mm.show_data(recipes["image"]).samples
    [picture] = sample.media[0].pictures
    folder = load_recipe(recipes["image"]).recipe.model.hf
    processor = (
        transformers.CLIPImageProcessorPil.from_pretrained(folder)
        if hasattr(transformers, "CLIPImageProcessorPil")
        else transformers.CLIPImageProcessor.from_pretrained(folder)
    )
    image = Image.open(recipes["image"].parent / "p.png")
    expected = processor(image, do_normalize=False, do_rescale=False)["pixel_values"][0]
    np.testing.assert_array_equal(picture, np.asarray(expected).transpose(1, 2, 0))
    assert sample.media[0].title == "image for vision"
    assert sample.counts["image tokens of vision"] == sum(token.kind == "medium" for token in sample.tokens)


def test_a_video_is_shown_frame_by_frame(recipes: dict[str, Path]) -> None:
    [sample] = mm.show_data(recipes["video"]).samples
    [medium] = sample.media
    reds = [int(frame[..., 0].mean()) for frame in medium.pictures]
    assert len(reds) == 4  # two seconds, two frames a second
    assert reds == sorted(reds)
    np.testing.assert_allclose(reds, [15 * number for number in (0, 4, 8, 12)], atol=22)
    assert "4 frames of 64 x 48 pixels" in medium.details


def test_a_clip_is_shown_as_its_spectrogram(recipes: dict[str, Path]) -> None:
    recipe, sample = prepared(recipes["audio"])
    [medium] = mm.show_data(recipes["audio"]).samples[0].media
    [picture] = medium.pictures
    assert recipe.model.audio is not None
    assert picture.shape == (recipe.model.audio.mel_bins, sample.media[0].items[0].rows, 3)
    brightness = picture[:, : SAMPLE_RATE_HZ // HOP_SAMPLES].sum(axis=(1, 2))
    loudest_bin = len(brightness) - 1 - int(brightness.argmax())  # from the bottom
    cells = sample.media[0].items[0].cells
    assert cells is not None
    assert loudest_bin == int(cells[: SAMPLE_RATE_HZ // HOP_SAMPLES].mean(axis=0).argmax())


def test_the_page_needs_no_other_file(recipes: dict[str, Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = _mmtrain("data", "show", "--recipe", str(recipes["video"]), "--sample", "0", "--sample", "1", "-o", page)
    assert done == f"{page} written\n"
    html = page.read_text()
    assert not re.search(r'(?:src|href)="(?!data:)', html)
    assert html.count("data:image/png;base64,") == 4
    assert "It cannot be used: malformed" in html
    assert 'class="special learned"' in html


def test_a_notebook_draws_what_the_page_shows(recipes: dict[str, Path]) -> None:
    shown = mm.show_data(recipes["image"], sample=[0, 1])
    assert isinstance(shown, ShownSamples)
    html = shown._repr_html_()
    assert html.count("data:image/png;base64,") == 1
    assert "mmtrain-view" in html
    assert "⟦186 pixels 🎈<|im_end|>⟧" in str(shown)


def test_json_has_ids_and_no_pictures(recipes: dict[str, Path]) -> None:
    [sample] = json.loads(_mmtrain("data", "show", "--recipe", recipes["image"], "--json"))
    _, as_prepared = prepared(recipes["image"])
    assert [i for run in sample["text"] for i in run["ids"]] == [token.id for token in as_prepared.tokens]
    assert [medium["title"] for medium in sample["media"]] == ["image for vision"]


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_a_terminal_colors_what_is_learned_and_draws_pictures(recipes: dict[str, Path]) -> None:
    main, terminal = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "CI")} | {"TERM": "xterm-256color"}
    process = subprocess.Popen(
        [sys.executable, "-m", "mmtrain", "data", "show", "--recipe", recipes["image"]],
        stdout=terminal, env=environment,
    )  # fmt: skip
    os.close(terminal)
    output = b""
    while True:
        try:
            block = os.read(main, 1 << 16)
        except OSError:
            break
        if not block:
            break
        output += block
    assert process.wait() == 0
    text = output.decode()
    assert "\x1b[30;42m186 pixels" in text
    assert "▀" in text
    assert "⟦" not in text


def test_a_number_beyond_the_last_sample_is_refused(recipes: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=r"--sample 7: .*text.json: has 2 samples; allowed: 0 to 1"):
        mm.show_data(recipes["text"], sample=7)


def test_another_file_is_read_with_the_recipes_columns(recipes: dict[str, Path], tmp_path: Path) -> None:
    entry = {"data": {"turns": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "yes"}]}}
    (tmp_path / "other.json").write_text(json.dumps([entry]))
    columns = "data.sources.0.columns={messages: data.turns}"
    [sample] = mm.show_data(recipes["text"], tmp_path / "other.json", set=[columns]).samples
    assert sample.problem is None
    output = _mmtrain("data", "check", tmp_path / "other.json", "--recipe", recipes["text"], "--set", columns)
    assert output.startswith("1 samples, 0 of them bad")


def test_held_out_and_cut_samples_say_so(recipes: dict[str, Path]) -> None:
    [held_out] = mm.show_data(recipes["text"], set=["data.validation_fraction=0.999"]).samples
    assert any("never trained on" in remark for remark in held_out.remarks)
    settings = ["data.too_long=cut", "data.max_sample_tokens=40"]
    [cut] = mm.show_data(recipes["text"], set=settings).samples
    assert cut.counts["LLM tokens"] == 40
    assert any("only its first 40 tokens" in remark for remark in cut.remarks)


def _mmtrain(*arguments: object) -> str:
    command: Sequence[str] = [sys.executable, "-m", "mmtrain", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
