"""`mmtrain chat` in a process of its own: answers equal those of `evaluate`, and ends are clean."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer

from mmtrain.printed_text import escape_controls
from mmtrain.weights.tiny_model import find_family_by_name, write_tiny_model
from tests.runtime.models import evaluated, run_folder
from tests.runtime.taught import Taught

NUM_TOKENS = 6
ROOT = Path(__file__).parents[2]


def chat(*arguments: object, typed: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "mmtrain", "chat", *map(str, arguments)]
    return subprocess.run(line, input=typed, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_answers_through_a_pipe_are_those_of_evaluate(taught: Taught, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", taught.settings, taught.model)
    out = tmp_path / "answers.jsonl"
    evaluated(run, out=out)
    answers = {line["question"]: line["answer"] for line in map(json.loads, out.read_text().splitlines())}
    red, green = taught.folder / "red.png", taught.folder / "green.png"
    typed = (
        f"{red} What colour?\n/new\n{green} What colour?\n\n/new\n{tmp_path}/no.png What?\nWhat is 1 + 2?\n/exit\nx\n"
    )
    done = chat(run, "--max-new-tokens", 4, typed=typed)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["red", "green", "3"]
    assert answers["What is 1 + 2?"] == "3"
    assert "mmtrain: this question is not answered:" in done.stderr
    assert f"{tmp_path}/no.png: there is no such file" in done.stderr


@pytest.mark.slow
def test_new_forgets_what_was_said(taught: Taught, tmp_path: Path) -> None:
    """A question in between is answered with a picture in its past, which the model has never learned."""
    run = run_folder(tmp_path / "run", taught.settings, taught.model)
    red = taught.folder / "red.png"
    typed = f"{red} What colour?\nWhat is 1 + 2?\n/new\nWhat is 1 + 2?\n"
    done = chat(run, typed=typed)
    assert done.returncode == 0, done.stderr
    first, *_, anew = done.stdout.splitlines()
    assert (first, anew) == ("red", "3")


@pytest.mark.slow
def test_a_model_folder_answers_by_its_own_template(tmp_path: Path) -> None:
    """The answer is that of transformers' greedy search behind the prompt of its own tokenizer; a picture is read."""
    folder, picture = tmp_path / "model", tmp_path / "red.png"
    write_tiny_model(find_family_by_name("qwen2_5_vl"), folder, 0, num_train=20)
    Image.new("RGB", (56, 56), "red").save(picture)
    done = chat(folder, "--max-new-tokens", NUM_TOKENS, typed=f"How are you?\n/new\n{picture} And here?\n")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    expected = greedy_answer_of_transformers(folder, "How are you?")
    assert expected
    assert done.stdout.startswith(f"{escape_controls(expected)}\n")
    assert len(done.stdout) > len(escape_controls(expected)) + 1, "the picture's question is answered too"


def greedy_answer_of_transformers(folder: Path, question: str) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype="float32")
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    unknown = list(range(len(tokenizer), model.config.text_config.vocab_size))  # which are never generated here
    written = model.generate(**prompt, do_sample=False, max_new_tokens=NUM_TOKENS, suppress_tokens=unknown)[0]
    ids = written[prompt["input_ids"].shape[1] :]
    answer: str = tokenizer.decode(ids, skip_special_tokens=True).strip()
    return answer


@pytest.mark.slow
def test_ctrl_c_leaves_without_a_traceback(taught: Taught, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", taught.settings, taught.model)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "mmtrain", "chat", str(run)]
    with subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("What is 1 + 2?\n")
        process.stdin.flush()
        assert process.stdout.readline() == "3\n"  # an answer has come while the pipe is still open
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors


@pytest.mark.slow
def test_what_is_neither_run_nor_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = chat(tmp_path / "empty", typed="")
    assert done.returncode == 2
    assert "has neither recipe.yaml nor config.json; allowed: the folder of a run" in done.stderr
    done = chat(tmp_path / "nothing", typed="")
    assert "nothing: there is no such folder" in done.stderr
