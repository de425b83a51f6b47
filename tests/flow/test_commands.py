"""The commands that a user types: they work together, and a mistake costs no traceback.

Most commands run in forked processes that have imported torch already; importing it takes longer than the commands.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from tests.data.model_folders import FAMILIES, write_folder
from tests.forked_command import run_forked

ROOT = Path(__file__).parents[2]
SMALL = ["train.steps=3", "train.checkpoint.every=0", "model.vision.layers=1", "model.llm.layers=1", "data.seq_len=192"]
OTHER_RUN = ["recipes/demo.yaml", "--run-dir", "runs/other"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the recipes and small demo data, laid out like the project."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "recipes").mkdir()
    for recipe in (ROOT / "recipes").glob("*.yaml"):
        (folder / "recipes" / recipe.name).write_bytes(recipe.read_bytes())
    done = run_forked(folder, "data", "demo", "--out", "demo-data", "--samples", "64", "--heldout", "12")
    assert done.returncode == 0, done.stderr
    return folder


def _run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def _sets(*settings: str) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def test_plan_train_alone_and_evaluate(folder: Path) -> None:
    """On half of the cluster, as the recipe allows; training starts as users start it."""
    fewer = (*SMALL, "cluster.ranks=4", "parallel.max_gpus=2", "parallel.placement=disaggregated")
    planned = run_forked(folder, "plan", "recipes/demo.yaml", *_sets(*fewer), "--out", "plan.json")
    assert planned.returncode == 0, planned.stderr
    assert "disaggregated" in planned.stdout
    settings = _sets(*fewer, "train.evaluate_every=3")
    command = [sys.executable, "-m", "mmtrain", "train", "recipes/demo.yaml", *settings, "--plan", "plan.json"]
    trained = _run(folder, *command)
    assert trained.returncode == 0, trained.stderr
    assert "step 3/3" in trained.stdout.replace("  ", " ")
    assert "attention: sdpa\n" in trained.stdout
    scored = run_forked(folder, "evaluate", "runs/demo", "--json", "--ranks", "2")
    assert scored.returncode == 0, scored.stderr
    assert "evaluating on 2 ranks by the plan of its training: disaggregated" in scored.stderr
    scores = json.loads(scored.stdout)
    assert scores["questions"] == 12
    *_, last = (folder / "runs/demo/metrics.jsonl").read_text().splitlines()
    assert json.loads(last)["val_exact"] == scores["exact"]


def test_a_run_is_compared_with_its_prediction(folder: Path) -> None:
    settings = _sets(*SMALL, "train.trace_steps=[2,3]")
    trained = run_forked(folder, "train", "recipes/demo.yaml", *settings, "--run-dir", "runs/traced")
    assert trained.returncode == 0, trained.stderr
    arguments = ["simulate", "recipes/demo.yaml", *settings, "--against", "runs/traced", "--out", "both.json", "--json"]
    compared = run_forked(folder, *arguments)
    assert compared.returncode == 0, compared.stderr
    comparison = json.loads(compared.stdout)
    assert comparison["steps"] == [2, 3]
    rows = {row["what"]: row for row in comparison["seconds"]}
    stages = {what.split()[0] for what in rows if "." in what}
    assert stages == {"llm.0", "vision.0"}
    on_both_sides = [
        row for what, row in rows.items() if what.startswith(("llm", "vision", "all", "optimizer", "step"))
    ]
    assert all(row["measured_s"] > 0 and row["predicted_s"] > 0 for row in on_both_sides)
    assert len(json.loads((folder / "both.json").read_text())["traceEvents"]) > 100
    page = run_forked(folder, "report", "runs/traced", "-o", "page.html")
    assert page.returncode == 0, page.stderr
    assert "vision.0 forward" in (folder / "page.html").read_text()


@pytest.mark.slow  # starts three Pythons; `test_launchers.py` runs torchrun's agent in a forked process
def test_train_under_torchrun(folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "mmtrain", "train"]
    done = _run(folder, *command, "recipes/demo.yaml", *_sets(*SMALL), "--run-dir", "runs/torchrun")
    assert done.returncode == 0, done.stderr
    plan = json.loads((folder / "runs" / "torchrun" / "plan.json").read_text())
    assert plan["world_size"] == 2
    assert len((folder / "runs" / "torchrun" / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "recipes/none.yaml"], "recipes/none.yaml"),
        (["train", "recipes/demo.yaml", *_sets("trian.steps=3")], "train"),
        (["train", *OTHER_RUN, *_sets("data.sources.0.path=gone.json")], "gone.json: no such file"),
        (["train", *OTHER_RUN, "--plan", "gone.json"], "gone.json: cannot read the plan"),
        (["evaluate", "runs/none"], "runs/none"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(folder: Path, arguments: list[str], says: str) -> None:
    done = run_forked(folder, *arguments)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow  # `test_a_recipe_trains_on_conversations_through_the_template` shows the steps
def test_a_model_folder_is_counted_checked_trained_and_scored(folder: Path) -> None:
    write_folder(folder / "model", FAMILIES["qwen2_vl"])
    settings = _sets(*SMALL, "data.tokenizer=model", "model.llm.vocab=1024", "train.evaluate_every=3")
    text = (folder / "recipes" / "demo.yaml").read_text()
    text = text.replace("../demo-data/tokenizer.json", "../model").replace("vocab: 512", "vocab: 1024")
    (folder / "recipes" / "templates.yaml").write_text(text)
    counted = run_forked(folder, "data", "stats", "demo-data/train.json", "--recipe", "recipes/templates.yaml")
    assert counted.returncode == 0, counted.stderr
    checked = run_forked(folder, "data", "check", "--recipe", "recipes/templates.yaml")
    assert checked.returncode == 0, checked.stderr
    trained = run_forked(folder, "train", "recipes/demo.yaml", *settings, "--run-dir", "runs/templates")
    assert trained.returncode == 0, trained.stderr
    scored = run_forked(folder, "evaluate", "runs/templates", "--json")
    assert scored.returncode == 0, scored.stderr
    assert json.loads(scored.stdout)["questions"] == 12


def test_recordings_of_digits_are_prepared_trained_and_scored(folder: Path) -> None:
    (folder / "recordings").mkdir()
    for digit in range(10):
        for index in range(7):
            wave = np.sin(np.arange(2400) * (digit + 2) / 10) * 0.3
            soundfile.write(folder / "recordings" / f"{digit}_robot_{index}.wav", wave, 8000)
    made = run_forked(folder, "data", "digits", "--source", "recordings", "--out", "digits-data")
    assert made.returncode == 0, made.stderr
    small = ["train.steps=2", "train.validate_every=0", "model.audio.layers=1", "model.llm.layers=1"]
    trained = run_forked(folder, "train", "recipes/spoken_digits.yaml", *_sets(*small))
    assert trained.returncode == 0, trained.stderr
    scored = run_forked(folder, "evaluate", "runs/spoken-digits", "--json")
    assert scored.returncode == 0, scored.stderr
    assert [t["questions"] for t in json.loads(scored.stdout)["templates"]] == [20]


def _write_lopsided(folder: Path) -> Path:
    """Write a file of long talks, where every eighth sample has four pictures in place of most of its words."""
    plain = json.loads((folder / "demo-data/train.json").read_text())
    pictures = [picture for sample in plain for picture in sample.get("image", [])]
    talks = [sample["conversations"] for sample in plain if "image" not in sample]
    samples: list[dict[str, object]] = []
    for i in range(len(plain)):
        num_rounds = 2 if i % 8 == 0 else 16
        talk = [dict(turn) for k in range(num_rounds) for turn in talks[(i + k) % len(talks)]]
        samples.append({"id": str(i), "conversations": talk})
        if i % 8 == 0:
            talk[0]["value"] = "<image>" * 4 + talk[0]["value"]
            samples[-1]["image"] = [pictures[(i + k) % len(pictures)] for k in range(4)]
    file = folder / "demo-data/lopsided.json"
    file.write_text(json.dumps(samples))
    return file


def _write_fast_links(folder: Path) -> Path:
    kinds = ("p2p", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
    messages = [{"kind": kind, "size": 2, "nbytes": [1, 2**24], "seconds": [1e-6, 1e-4]} for kind in kinds]
    content = {"hardware": "cpu-core", "device": "one core of a fast machine", "precision": "fp32", "software": {},
               "date": "2026-11-27", "messages": messages, "core_speed": {"gemm_s": 1e-6, "copy_s": 1e-6}}  # fmt: skip
    table = folder / "fast-links.json"
    table.write_text(json.dumps(content), encoding="utf-8")
    return table


@pytest.mark.slow
def test_auto_plans_replicated_units_and_trains_them(folder: Path) -> None:
    """Where few samples hold all pictures, ranks that encode each other's are the fastest, and `train` runs that.

    The costs are of a machine with fast links and copies: on tiny layers of CPUs sharding costs more than it saves.
    """
    settings = _sets(
        f"cluster.costs={_write_fast_links(folder)}",
        f"data.sources.0.path={_write_lopsided(folder)}",
        *("parallel.placement=auto", "cluster.ranks=2", "train.global_batch=8", "train.validate_every=0"),
        *("data.image.size=96", "model.vision.max_side=8", "model.vision.layers=8", "model.vision.ffn=1024"),
        *("model.llm.ffn=512", "train.steps=3", "train.checkpoint.every=0"),
    )
    planned = run_forked(folder, "plan", "recipes/demo.yaml", *settings, "--json")
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    assert plan["placement"] == "replicated"
    assert {other["placement"] for other in plan["alternatives"]} >= {"unified", "disaggregated", "colocated"}
    run_dir = folder / "runs/replicated"
    arguments = ["recipes/demo.yaml", *settings, "--run-dir", str(run_dir)]
    trained = _run(folder, sys.executable, "-m", "mmtrain", "train", *arguments)
    assert trained.returncode == 0, trained.stderr
    assert "replicated plan on 2 ranks" in trained.stdout
    trained_by = json.loads((run_dir / "plan.json").read_text())
    assert trained_by["units"] == plan["units"]
    assert {unit["dispatch"] for unit in trained_by["units"].values()} == {"all"}
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 3
    verified = run_forked(folder, "verify", "recipes/demo.yaml", *settings)
    assert verified.returncode == 0, verified.stderr
    assert "The plan computes what one process computes." in verified.stdout
