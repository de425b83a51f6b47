"""What files of others hold cannot drive the terminal, whichever command prints it."""

import io
import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mmtrain.data.synthetic.demo import generate_demo
from mmtrain.printed_text import escape_controls
from mmtrain.report.console import Console
from tests.forked_command import run_forked

HOSTILE = "a\x1b]0;owned\x07\x1b[2Jb\r\u202egnp\x9b1A"
SHOWN = r"a\x1b]0;owned\x07\x1b[2Jb\r\u202egnp\x9b1A"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
DEMO = Path(__file__).parents[1] / "recipes" / "demo.yaml"


def test_text_of_every_language_stays_as_it_is() -> None:
    text = "naïve\tשלום سلام 日本語 👩‍👩‍👧 می‌خواهم\n"
    assert escape_controls(text) == text
    assert escape_controls(HOSTILE) == SHOWN


@pytest.mark.parametrize("color_system", [None, "truecolor"])
def test_a_console_escapes_texts_and_not_what_it_writes_itself(color_system: str | None) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, color_system=color_system, width=200)  # type: ignore[arg-type]
    table = Table("head")
    table.add_row(HOSTILE.replace("[", r"\["), style="red")
    with Live(table, console=console, auto_refresh=False):
        console.print()
        console.print(HOSTILE, markup=False, highlight=False)
        console.print(Text(HOSTILE))
    written = output.getvalue()
    assert f"│ {SHOWN} │" in written or SHOWN in re.sub("\x1b\\[[0-9;]*m", "", written)
    assert f"{SHOWN}\n" in written
    assert not re.search("\x1b\\]|\x07|\u202e|\x9b|\x1b\\[2J", written)
    assert ("\x1b[31m" in written) == (color_system is not None)
    assert "\x1b[?25l" in written, "the cursor is hidden while something moves"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = run_forked(folder, *arguments)
    assert not OBEYED.search(done.stdout + done.stderr), f"{arguments}: {done.stdout + done.stderr!r}"
    return done


def rows_of(folder: Path, image: str, text: str = "<image>why") -> None:
    turns = [{"from": "human", "value": text}, {"from": "gpt", "value": "red"}]
    (folder / "rows.json").write_text(json.dumps([{"id": HOSTILE, "conversations": turns, "image": image}]))


def path_of_an_image(folder: Path) -> list[str]:
    rows_of(folder, f"{HOSTILE}.png")
    return ["data", "check", "rows.json"]


def key_of_an_entry(folder: Path) -> list[str]:
    (folder / "rows.json").write_text(json.dumps([{HOSTILE: 1}]))
    return ["data", "check", "rows.json"]


def member_of_a_shard(folder: Path) -> list[str]:
    with tarfile.open(folder / "shard.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo(f"{HOSTILE}.json"), io.BytesIO())
    return ["data", "check", "shard.tar"]


def text_of_a_sample(folder: Path) -> list[str]:
    rows_of(folder, "none.png", text=HOSTILE)
    rows = json.loads((folder / "rows.json").read_text())
    del rows[0]["image"]
    (folder / "rows.json").write_text(json.dumps(rows))
    generate_demo(folder / "demo", seed=0, train=8, heldout=8)
    return ["data", "show", "rows.json", "--recipe", str(DEMO), "--set", "data.tokenizer=demo/tokenizer.json"]


def key_of_a_recipe(folder: Path) -> list[str]:
    (folder / "recipe.yaml").write_text(f"{json.dumps(HOSTILE)}: 1\nname: t\n")
    return ["plan", "recipe.yaml"]


def key_of_a_config(folder: Path) -> list[str]:
    assert run_forked(folder, "data", "tiny-model", "llava", "--out", "model").returncode == 0
    config = json.loads((folder / "model" / "config.json").read_text())
    config["text_config"]["hidden_act"] = HOSTILE
    (folder / "model" / "config.json").write_text(json.dumps(config))
    return ["inspect", "model"]


def name_of_a_tensor(folder: Path) -> list[str]:
    assert run_forked(folder, "data", "tiny-model", "llava", "--out", "model").returncode == 0
    weights = folder / "model" / "model.safetensors"
    content = weights.read_bytes()
    num_bytes = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + num_bytes])
    header[HOSTILE] = header.pop(next(name for name in header if "k_proj.weight" in name))
    text = json.dumps(header).encode()
    weights.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + num_bytes :])
    return ["inspect", "model"]


def message_of_a_template(folder: Path) -> list[str]:
    assert run_forked(folder, "data", "tiny-model", "llava", "--out", "model").returncode == 0
    for template in (folder / "model").glob("chat_template*"):
        template.unlink()
    (folder / "model" / "chat_template.jinja").write_text(f"{{{{ raise_exception({HOSTILE!r}) }}}}")
    rows_of(folder, "none.png", text="why")
    rows = json.loads((folder / "rows.json").read_text())
    del rows[0]["image"]
    (folder / "rows.json").write_text(json.dumps(rows))
    recipe = {
        "name": "t",
        "model": {"hf": "model"},
        "data": {"sources": [{"path": "rows.json"}], "tokenizer": "model", "seq_len": 64},
        "train": {"steps": 1, "global_batch": 1, "optimizer": {"lr": 1e-3}},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return ["data", "stats", "--recipe", "recipe.yaml"]


CASES = [
    path_of_an_image,
    key_of_an_entry,
    member_of_a_shard,
    text_of_a_sample,
    key_of_a_recipe,
    key_of_a_config,
    name_of_a_tensor,
    message_of_a_template,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_commands_print_no_control_characters_of_files(tmp_path: Path, case: Callable[[Path], list[str]]) -> None:
    done = run(tmp_path, *case(tmp_path))
    assert "owned" in done.stdout + done.stderr, done


def test_a_run_prints_none_of_what_its_data_holds(tmp_path: Path) -> None:
    """Ranks and loader workers name a picture that has gone since its lengths were read."""
    generate_demo(tmp_path, seed=0, train=40, heldout=8)
    rows = json.loads((tmp_path / "train.json").read_text())
    victim = next(row for row in rows if row.get("image"))
    bad = "images/" + HOSTILE + ".png"
    shutil.copy(
        tmp_path / (victim["image"] if isinstance(victim["image"], str) else victim["image"][0]), tmp_path / bad
    )
    victim["image"] = bad
    (tmp_path / "train.json").write_text(json.dumps(rows))
    content = bytearray((tmp_path / bad).read_bytes())
    content[len(content) // 2] ^= 255  # only decoding shows it
    (tmp_path / bad).write_bytes(content)
    settings = ["data.sources.0.path=train.json", "data.validation=[]", "train.validate_every=0", "train.steps=4"]
    settings += ["data.tokenizer=tokenizer.json", "data.max_bad_rate=1", "data.workers=1", f"run_dir={tmp_path}/run"]
    done = run(tmp_path, "train", str(DEMO), *(word for setting in settings for word in ("--set", setting)))
    assert done.returncode == 0, done.stderr
    assert "owned" in (tmp_path / "run" / "quarantine.jsonl").read_text()
