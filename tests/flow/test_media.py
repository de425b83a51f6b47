"""Whole runs on tiles, films and sound: the same on one rank from files as on two from a tar shard."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from mmtrain.data.synthetic.demo import train_tokenizer
from mmtrain.planning.whatif import plan_again
from mmtrain.recipe import load_recipe
from mmtrain.recipe.settings.modalities import AUDIO
from mmtrain.report import read_metrics
from mmtrain.runtime.run_folder import QUARANTINE_FILE
from mmtrain.runtime.training.train_request import TrainRequest
from tests.data.archives import movie, png, tar, wav
from tests.flow.runs import run_all
from tests.plans import plan_recipe as planner

RECIPE = Path(__file__).parents[2] / "recipes" / "media_files.yaml"
SMALL = [
    "data.seq_len=256",
    "data.image.tile=32",
    "model.vision.layers=1",
    "model.audio.layers=1",
    "model.llm.layers=1",
]
# A second encoder of each modality: both read every tile, frame and clip.
SHAPE = "layers: 1, hidden: 32, heads: 2, ffn: 32"
SMALL += [
    f"model.encoders.fine={{modality: vision, {SHAPE}, patch: 8, downsample: pixel_shuffle, merge: 2, max_side: 4}}",
    f"model.encoders.ear={{modality: audio, {SHAPE}, mel_bins: 40, max_frames: 1000, downsample: 2}}",
]
SMALL += ["train.steps=3", "train.global_batch=4", "data.workers=0"]


@pytest.fixture
def media(tmp_path: Path) -> Path:
    """Samples as files and as a shard, with a tokenizer."""
    members: dict[str, bytes] = {}
    rows = []
    for i, (colour, width, height) in enumerate(
        [("red", 64, 32), ("blue", 20, 90), ("lime", 30, 30), ("navy", 64, 64)]
    ):
        media = {f"{i}.png": png(colour, width, height), f"{i}.wav": wav(0.2 + 0.1 * i)}
        if i % 2:
            media[f"{i}.mp4"] = movie([colour, "white"], width=48, height=32)
        text = "<audio>what is <image>" + "<video>" * (i % 2)
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": f"it is {colour}"}]
        entry = {"id": str(i), "messages": turns, "images": [f"{i}.png"], "audios": [f"{i}.wav"]}
        entry |= {"videos": [f"{i}.mp4"]} if i % 2 else {}
        rows += [entry, {"id": f"text {i}", "messages": [turns[1] | {"role": "user"}, turns[1]]}]
        members |= {f"{i}.json": json.dumps(entry).encode(), **media, f"text {i}.json": json.dumps(rows[-1]).encode()}
        for name, content in media.items():
            (tmp_path / name).write_bytes(content)
    (tmp_path / "all.json").write_text(json.dumps(rows))
    tar(tmp_path / "all.tar", members)
    train_tokenizer(iter(["what is red? it is blue"])).save(str(tmp_path / "t.json"))
    tokenizer = Tokenizer.from_file(str(tmp_path / "t.json"))
    tokenizer.add_special_tokens([AUDIO.placeholder])
    tokenizer.save(str(tmp_path / "t.json"))
    return tmp_path


def _losses(media: Path, source: str, world_size: int, *changes: str) -> list[float]:
    run_dir = media / f"run-{source}-{world_size}"
    paths = [f"data.sources.0.path={media / source}", f"data.tokenizer={media}/t.json"]
    loaded = load_recipe(RECIPE, [*paths, *SMALL, *changes])
    request = TrainRequest(loaded, planner, plan_again, "cpu-core", world_size, run_dir)
    assert run_all(*[request] * world_size) == [""] * world_size
    assert (run_dir / QUARANTINE_FILE).read_text() == ""
    return [step["loss"] for step in read_metrics(run_dir)]


@pytest.mark.slow
def test_formats_and_ranks_change_nothing(media: Path) -> None:
    alone = _losses(media, "all.json", 1)
    assert alone[-1] < alone[0]
    assert _losses(media, "all.tar", 2, "parallel.llm.dp=2") == pytest.approx(alone, rel=1e-5)
