"""`data.thoughts`: `enable_thinking` of a template, and which part of an answer is learned."""

from pathlib import Path
from typing import Any

import pytest

from mmtrain.data import Turn
from mmtrain.data.formats.sample import Sample
from mmtrain.data.synthetic.demo import generate_demo
from mmtrain.data.text.load_tokenizer import load_recipe_tokenizer, load_tokenizer
from mmtrain.data.text.sample_tokenizer import IGNORE_INDEX, SampleTokenizer
from mmtrain.errors import DataError
from mmtrain.recipe import load_recipe
from mmtrain.recipe.settings.text_settings import ThoughtSettings
from tests.data.model_folders import FAMILIES, write_folder
from tests.data.thinking_folders import THINKING_FAMILIES

THOUGHT, ANSWER = "Two and two.", "It is four."
SAMPLE = Sample(
    "", "", 0, (Turn("user", "How many?"), Turn("assistant", f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}")), ()
)
READS_CHOICE = THINKING_FAMILIES["qwen3_thinking"].template.replace(
    "'<|im_start|>assistant\\n<think>\\n'",
    "'<|im_start|>assistant\\n<think>\\n' + ('\\n</think>\\n\\n' if enable_thinking is false else '')",
)


def _learned(tokenizer: SampleTokenizer, sample: Sample = SAMPLE) -> str:
    encoded = tokenizer.encode(sample, {})
    learned = encoded.labels[encoded.labels != IGNORE_INDEX]
    assert tokenizer.length_counter(1000)(sample, {}) == (len(encoded.ids), len(learned))
    return tokenizer.decode(learned)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_thinking", "glm"])
def test_thoughts_are_learned_unless_they_are_context(name: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, THINKING_FAMILIES[name])
    assert THOUGHT in _learned(load_tokenizer(folder))
    tokenizer = load_tokenizer(folder, thoughts=ThoughtSettings(learn=False))
    assert _learned(tokenizer).strip() == ANSWER
    plain = Sample("", "", 0, (Turn("user", "How many?"), Turn("assistant", ANSWER)), ())
    assert _learned(tokenizer, plain).strip() == ANSWER


def test_a_recipe_tells_the_template_not_to_think(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", FAMILIES["qwen2"], chat_template=READS_CHOICE)
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "name: t\nmodel: {llm: {layers: 2, hidden: 32, heads: 2, ffn: 64, vocab: 1024}}\n"
        "data: {sources: [{path: data.json}], tokenizer: model, seq_len: 64}\n"
        "train: {steps: 1, global_batch: 1, optimizer: {lr: 1.0e-3}}\n",
        encoding="utf-8",
    )
    texts = {}
    for choice in ("null", "true", "false"):
        recipe = load_recipe(path, [f"data.thoughts.enable_thinking={choice}"], env={}).recipe
        tokenizer = load_recipe_tokenizer(recipe)
        prompt = tokenizer.decode(tokenizer.prompt_ids(SAMPLE, {}))
        texts[choice] = prompt.rpartition("assistant\n")[2], _learned(tokenizer).strip()
    assert texts["null"] == texts["true"] == ("<think>\n", f"{THOUGHT}\n</think>\n\n{ANSWER}")
    assert texts["false"] == ("<think>\n\n</think>\n\n", ANSWER)


def test_a_template_that_does_not_read_the_choice_rejects_it(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, FAMILIES["qwen2"])
    message = r"data.thoughts.enable_thinking: found false, but the chat template .* does not read enable_thinking"
    with pytest.raises(DataError, match=message):
        load_tokenizer(folder, thoughts=ThoughtSettings(enable_thinking=False))


@pytest.mark.parametrize("choice", [{"learn": False}, {"enable_thinking": True}])
def test_own_chat_format_has_no_choice(choice: dict[str, Any], tmp_path: Path) -> None:
    generate_demo(tmp_path, seed=1, train=8, heldout=2)
    with pytest.raises(DataError, match=r"data.thoughts: found .* mmtrain's own chat format .* has no template"):
        load_tokenizer(tmp_path / "tokenizer.json", thoughts=ThoughtSettings(**choice))
