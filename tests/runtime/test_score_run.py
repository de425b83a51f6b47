"""`mmtrain evaluate` on models whose answers are known: an untrained one, and one that was taught three colours."""

import json
import os
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from mmtrain.cli import main
from mmtrain.data.formats.sample import AUDIO_MARK, IMAGE_MARK, Sample, Turn
from mmtrain.data.index.data_index import build_index
from mmtrain.data.media.media_bytes import FileMedia
from mmtrain.data.synthetic.demo import generate_demo as generate_demo
from mmtrain.data.text.chat_tokenizer import ChatTokenizer
from mmtrain.errors import CheckpointError, TooManyBadSamples, UserError
from mmtrain.recipe import Recipe
from mmtrain.report.evaluation_result import TemplateScore
from mmtrain.runtime.evaluation.qa_eval import HeldOutQuestion, evenly_spaced, prompt_lengths, select_questions
from mmtrain.runtime.evaluation.score_run import score
from mmtrain.runtime.world import ALLOCATOR_SETTINGS, ALLOCATOR_VARIABLES
from tests.data.archives import movie
from tests.data.model_folders import FAMILIES, write_folder
from tests.data.rows import Row, row
from tests.data.thinking_folders import THINKING_FAMILIES
from tests.pixels import undecodable_png
from tests.runtime.models import evaluated, recipe, run_folder, teach, whole
from tests.runtime.taught import COLOURS, Taught, asking, write


def test_a_taught_model_scores_above_its_blind_baselines(taught: Taught, tmp_path: Path) -> None:
    result = evaluated(run_folder(tmp_path / "run", taught.settings, taught.model))
    colour, sums = result.templates
    assert result.step == 7
    assert (colour.template, colour.questions, colour.exact, colour.baseline) == ("colour", 3, 3, 1)
    assert colour.blanked in (0, 1)  # three times one picture is three times one answer
    assert sums == TemplateScore("sum", questions=1, exact=1, baseline=1, blanked=None)
    assert {(e.expected, e.answered) for e in result.examples} == {(c, c) for c in (*COLOURS, "3")}
    shown = next(e for e in result.examples if e.expected == "red")
    assert (shown.question, shown.images) == ("<image>What colour?", (str(taught.folder / "red.png"),))


@pytest.mark.slow
def test_a_model_taught_through_a_chat_template_answers_through_it(taught: Taught, tmp_path: Path) -> None:
    model_folder = write_folder(tmp_path / "model", FAMILIES["qwen2_vl"])
    known = taught.settings
    settings = known.model_copy(
        update={
            "data": known.data.model_copy(update={"tokenizer": model_folder}),
            "model": known.model.model_copy(update={"llm": known.model.llm.model_copy(update={"vocab": 1024})}),
        }
    )
    result = evaluated(run_folder(tmp_path / "run", settings, teach(settings)))
    assert [score.exact for score in result.templates] == [3, 1]
    assert {(e.expected, e.answered) for e in result.examples} == {(c, c) for c in (*COLOURS, "3")}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "learned"), [("qwen3", ""), ("qwen3_thinking", "<think>\nI know.\n</think>\n\n")])
def test_a_perfect_model_is_right_whatever_it_thinks(tmp_path: Path, name: str, learned: str) -> None:
    """An empty thought that the template writes, or one that the model writes, is no part of its answer."""
    folder = write_folder(tmp_path / "model", THINKING_FAMILIES[name])
    answers = {"What colour is grass?": "green", "What is 1 + 2?": "3", "Is it day?": "yes"}
    files = []
    for thought in (learned, "<think>\nThe data thinks this.\n</think>\n\n"):
        rows = [row(question, thought + answer) for question, answer in answers.items()]
        files.append(write(tmp_path / f"{len(thought)}.json", rows))
    plain = recipe(tmp_path / "no-tokenizer.json", files[0], files[1], vocab=1024).model_dump()
    plain["model"]["vision"] = None
    plain["data"]["tokenizer"] = folder
    settings = Recipe.model_validate(plain)
    result = evaluated(run_folder(tmp_path / "run", settings, teach(settings, 900)))
    assert (result.total.exact, result.total.questions) == (3, 3)
    assert {(e.expected, e.answered) for e in result.examples} == {(a, a) for a in answers.values()}
    assert result.total.baseline == 1, "what the data thinks is no part of the baseline's answer either"


def test_one_rank_chooses_the_allocator_as_the_ranks_of_a_run_do(
    taught: Taught, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ALLOCATOR_VARIABLES:
        monkeypatch.setenv(variable, "")  # so that it is put back
        monkeypatch.delenv(variable)
    evaluated(run_folder(tmp_path / "run", taught.settings, taught.model))
    assert os.environ[ALLOCATOR_VARIABLES[0]] == ALLOCATOR_SETTINGS


def test_blank_images_makes_the_score_itself_blind(taught: Taught, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", taught.settings, taught.model)
    sighted, blind = (evaluated(folder, blank_images=blank).templates for blank in (False, True))
    assert blind[0].exact == blind[0].blanked == sighted[0].blanked
    assert blind[1] == sighted[1]


def test_data_without_templates_is_one_template(taught: Taught, tmp_path: Path) -> None:
    bare = [{key: value for key, value in r.items() if key != "template"} for r in taught.rows]
    settings = taught.recipe([*taught.rows, taught.rows[1]], bare)  # the training data may still name its own
    (score,) = evaluated(run_folder(tmp_path / "run", settings, taught.model)).templates
    assert (score.template, score.questions, score.exact, score.baseline) == ("all", 4, 4, 1)
    assert score.blanked in (1, 2)  # the sum needs no image


def test_the_command_says_how_many_questions_are_answered(
    taught: Taught, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All four, then the three with an image once more without it."""
    folder = run_folder(tmp_path / "run", taught.recipe(taught.rows, taught.rows), taught.model)
    monkeypatch.setattr(sys, "argv", ["mmtrain", "evaluate", str(folder)])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("answered")]
    assert lines == ["answered 4 of 4", "answered 3 of 3"]


def test_a_limit_takes_questions_from_everywhere(taught: Taught, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", taught.recipe(taught.rows, taught.rows), taught.model)
    result = evaluated(folder, limit=2)
    assert [example.expected for example in result.examples] == ["red", "blue"]
    assert result.total.questions == 2


def test_a_broken_image_costs_its_question_and_is_named(taught: Taught, tmp_path: Path, capsys) -> None:
    (taught.folder / "broken.png").write_bytes(undecodable_png((taught.folder / "red.png").read_bytes()))
    rows = [*taught.rows, asking("colour", row("<image>What colour?", "red", "broken.png", name="b1"))]
    folder = run_folder(tmp_path / "run", taught.recipe(taught.rows, rows, max_bad_rate=0.5), taught.model)
    assert evaluated(folder).total.questions == 4
    err = capsys.readouterr().err
    assert "1 of 5 held-out samples are unusable and not asked" in err
    assert "'b1'" in err
    run_folder(folder, taught.recipe(taught.rows, rows, max_bad_rate=0.1))
    with pytest.raises(TooManyBadSamples, match="broken"):
        evaluated(folder)


def test_the_prompt_ends_where_the_last_answer_begins(taught: Taught) -> None:
    talk = [("human", "<image>What colour?"), ("gpt", "red"), ("human", "<image>And this?"), ("gpt", " blue ")]
    after = [("human", "<image>Thanks, here is another")]
    turns = [{"from": who, "value": text} for who, text in (*talk, *after)]
    rows = [{"image": ["red.png", "blue.png", "green.png"], "conversations": turns}]
    settings = taught.recipe(taught.rows, rows)
    tokenizer = ChatTokenizer.load(settings.data.tokenizer)
    index = build_index(settings, "validation")
    (question,) = select_questions(index, None)
    assert [Path(str(image)).name for image in question.images] == ["red.png", "blue.png"]
    assert question.expected == "blue"
    lengths = prompt_lengths(index, tokenizer, [question])
    ids = tokenizer.prompt_ids(question.sample, index.media_features(0))
    assert np.isin(ids, tokenizer.item_ids["vision"]).sum() == sum(index.unit_features(0, "vision")[:2])
    assert lengths.tokens.tolist() == [len(ids)]
    assert lengths.items["vision"].first.tolist() == [0, 2]
    assert lengths.items["vision"].rows.tolist() == index.lengths.items["vision"].rows[:2].tolist()


def test_a_prompt_has_the_items_of_all_encoders_that_it_shows(taught: Taught) -> None:
    talk = [("human", "<image>What colour?"), ("gpt", "red"), ("human", "<image>And this?"), ("gpt", "blue")]
    turns = [{"from": who, "value": text} for who, text in (*talk, ("human", "<image>Thanks, here is another"))]
    rows = [{"image": ["red.png", "blue.png", "green.png"], "conversations": turns}]
    plain = taught.recipe(taught.rows, rows).model_dump()
    plain["model"]["encoders"] = {"fine": plain["model"]["vision"] | {"patch": 4, "max_side": 16}}
    settings = Recipe.model_validate(plain)
    index = build_index(settings, "validation")
    lengths = prompt_lengths(index, ChatTokenizer.load(settings.data.tokenizer), select_questions(index, None))
    assert {unit: items.first.tolist() for unit, items in lengths.items.items()} == {"vision": [0, 2], "fine": [0, 2]}
    assert lengths.tokens[0] < index.lengths.tokens[0]


def test_a_prompt_shows_all_frames_of_its_video(taught: Taught) -> None:
    (taught.folder / "video.mp4").write_bytes(movie(["red", "blue"]))
    talk = [("human", "<video><image>What colour?"), ("gpt", "red"), ("human", "<image>Thanks, here is another")]
    turns = [{"from": who, "value": text} for who, text in talk]
    settings = taught.recipe(
        taught.rows, [{"image": ["red.png", "blue.png"], "video": "video.mp4", "conversations": turns}]
    )
    index = build_index(settings, "validation")
    lengths = prompt_lengths(index, ChatTokenizer.load(settings.data.tokenizer), select_questions(index, None))
    num_items = len(index.lengths.items["vision"].rows)
    assert num_items > 3, "two pictures, and several frames"
    assert lengths.items["vision"].first.tolist() == [0, num_items - 1]


def test_an_untrained_model_on_demo_data(tmp_path: Path) -> None:
    data = tmp_path / "data"
    generate_demo(data, seed=4, train=150, heldout=40)
    settings = recipe(data / "tokenizer.json", data / "train.json", data / "heldout.json")
    result = evaluated(run_folder(tmp_path / "run", settings, whole(settings)))

    answers: dict[str, Counter[str]] = {}
    for entry in json.loads((data / "train.json").read_text()):
        answers.setdefault(entry["template"], Counter())[entry["conversations"][-1]["value"]] += 1
    expected: Counter[str] = Counter()
    heldout = json.loads((data / "heldout.json").read_text())
    for entry in heldout:
        num_by_answer = answers[entry["template"]]
        best = sorted(text for text in num_by_answer if num_by_answer[text] == max(num_by_answer.values()))[0]
        expected[entry["template"]] += entry["conversations"][-1]["value"] == best
    assert {s.template: s.baseline for s in result.templates} == {
        t: expected[t] for t in {e["template"] for e in heldout}
    }
    assert {s.template for s in result.templates if s.blanked is None} == {
        e["template"] for e in heldout if "image" not in e
    }
    assert result.total.questions == 40
    assert result.total.exact < result.total.baseline
    of_example = [next(e for e in heldout if _asks(e, shown.question))["template"] for shown in result.examples]
    assert len(of_example) == len(set(of_example)) == 5


def _asks(entry: Row, text: str) -> bool:
    return entry["conversations"][0]["value"] == text


def test_scores_are_counted_per_template() -> None:
    def ask(template: str | None, expected: str, num_images: int, num_clips: int = 0) -> HeldOutQuestion:
        turns = Turn("user", IMAGE_MARK * num_images + AUDIO_MARK * num_clips), Turn("assistant", expected)
        media = FileMedia("x")
        return HeldOutQuestion(0, Sample("", "", 0, turns, (media,) * num_images, template, (media,) * num_clips))

    a, b, c, d = ask("one", "yes", 1), ask("one", "no", 2, 1), ask("two", "7", 0), ask(None, "no", 0)
    answers = {a: "yes", b: "no", c: "8", d: "no"}
    training = [("one", "no"), ("one", "yes"), ("two", "7"), ("two", "7"), ("two", "9"), ("three", "no")]
    right = {question: question.expected for question in answers}
    assert score(answers, {**answers, b: "?"}, right, training) == (
        TemplateScore("all", questions=1, exact=1, baseline=0, blanked=None),  # of all answers "7" and "no": "7"
        TemplateScore("one", questions=2, exact=2, baseline=1, blanked=1, modalities=("images", "clips")),  # "no"
        TemplateScore("two", questions=1, exact=0, baseline=1, blanked=None),
    )
    assert [s.baseline for s in score(answers, answers, right, [])] == [0, 0, 0]


def test_evenly_spaced_items_are_distinct_and_evenly_spread() -> None:
    for size in range(12):
        for count in range(1, 15):
            picked = evenly_spaced(range(size), count)
            assert len(picked) == len(set(picked)) == min(size, count)
            gaps = np.diff([*picked, size])
            assert size == 0 or gaps.max() - gaps.min() <= 1


def test_a_damaged_checkpoint_is_named_and_passed_over(taught: Taught, tmp_path: Path, capsys) -> None:
    folder = run_folder(tmp_path / "run", taught.settings, taught.model, step=7)
    run_folder(folder, taught.settings, taught.model, step=9)
    shard = folder / "checkpoints/step-00000009/rank-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert evaluated(folder, limit=1).step == 7
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before, "a run may be training there"
    assert "step-00000009 is damaged" in capsys.readouterr().err
    (folder / "checkpoints/step-00000007/manifest.json").unlink()
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        evaluated(folder, limit=1)


def test_a_folder_that_is_no_run_is_refused(taught: Taught, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere: not the folder of a run: there is no such folder\. .*mmtrain train"):
        evaluated(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"it has no recipe\.yaml"):
        evaluated(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint yet; training writes the first one after step 50"):
        evaluated(run_folder(tmp_path / "early", taught.settings))


def test_a_recipe_without_held_out_data_is_refused(taught: Taught, tmp_path: Path) -> None:
    settings = taught.recipe(taught.rows, taught.rows, validation=())
    with pytest.raises(UserError, match=r"recipe\.yaml: data\.validation: no held-out data"):
        evaluated(run_folder(tmp_path / "run", settings, taught.model))
