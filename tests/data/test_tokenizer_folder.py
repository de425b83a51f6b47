"""What a model folder must hold, what may be wrong with it, and how a recipe trains with it."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import AddedToken, Tokenizer

from mmtrain.balance import Grouping
from mmtrain.data import GroupStream, PayloadNeed, Sample, Turn, build_index, load_tokenizer
from mmtrain.data.loading.batch_builder import StepBuilder, StepRequest
from mmtrain.data.media.media_bytes import FileMedia
from mmtrain.data.text.sample_tokenizer import IGNORE_INDEX, BadConversationError
from mmtrain.data.text.template_tokenizer import TemplateTokenizer
from mmtrain.data.text.tokenizer_folder import tokenizer_sha256
from mmtrain.errors import DataError
from mmtrain.families.family import MediaMarkup
from mmtrain.recipe.settings.model_settings import ModelSettings
from mmtrain.recipe.settings.schema import Recipe
from tests.data.model_folders import CHATML, FAMILIES, write_folder
from tests.data.rows import row
from tests.runtime.models import recipe as tiny_recipe

QWEN = FAMILIES["qwen2"]


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("qwen"), QWEN)


@pytest.fixture
def folder(tmp_path: Path, qwen_folder: Path) -> Path:
    """A copy that the test may change."""
    copy = tmp_path / "model"
    copy.mkdir()
    for file in qwen_folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def sample(*turns: tuple[str, str], images: int = 0) -> Sample:
    media = tuple(FileMedia(f"{i}.png") for i in range(images))
    return Sample("s", "f.json", 0, tuple(Turn(role, text) for role, text in turns), media)  # type: ignore[arg-type]


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text()) | changes
    entries = {name: value for name, value in config.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(entries))


def rejected(folder: Path, template: str | None = None) -> str:
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(DataError) as error:
        load_tokenizer(folder)
    assert str(error.value).startswith("data.tokenizer: ")
    return str(error.value)


def text_of(tokenizer: TemplateTokenizer, ids: Any) -> str:
    """Return the text of ids, special tokens included."""
    return str(tokenizer._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))


def test_a_folder_without_a_template_is_rejected(folder: Path) -> None:
    change_config(folder, chat_template=None)
    assert "has no chat template" in rejected(folder)


def test_a_template_in_its_own_file_comes_first(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(CHATML.replace("Be helpful.", "Be brief."))
    tokenizer = TemplateTokenizer.load(folder)
    assert "Be brief." in text_of(tokenizer, tokenizer.prompt_ids(sample(("user", "q"), ("assistant", "a")), {}))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}\n{{ m.content }\n{% endfor %}", r"chat_template.jinja, line 2: .*not valid Jinja"),
        ("{{ messages[0].content.__class__ }}", r"line 1: the chat template reaches for `__class__`"),
        ("{{ messages | map(attribute='__class__') | list }}", "reaches for `__class__`"),
        ("{{ messages[0]['__init__'] }}", "reaches for `__init__`"),
        ("{% include 'other' %}", "line 1: the chat template loads another template"),
        ("{{ messages.append(1) }}", "cannot render a question: .*unsafe"),
        ("{{ 1 / 0 }}", "cannot render a question: ZeroDivisionError"),
        ("{{ raise_exception('tools only') }}", "cannot render a question: tools only"),
        ("{{ bos_token }}", "does not write the text of a user's turn"),
        ("{{ messages[0].content }}", "does not write the text of an assistant's turn"),
        ("{% for m in messages %}<|im_start|>{{ m.role + m.content }}<|im_end|>{% endfor %}", "no generation prompt"),
        (CHATML.replace("<|im_", "<|turn_"), r"special tokens <\|turn_start\|> <\|turn_end\|>, which the tokenizer"),
        (CHATML.replace("'<|im_end|>\\n'", "cls_token"), r"writes the special tokens \[CLS\], which"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_be_trained_with_is_rejected(folder: Path, template: str, message: str) -> None:
    change_config(folder, cls_token="[CLS]")
    text = rejected(folder, template)
    assert re.search(message, text), text


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_template_that_teaches_no_end_is_a_warning(name: str, tmp_path: Path) -> None:
    """LLaVA-1.5's does not."""
    warnings = load_tokenizer(write_folder(tmp_path, FAMILIES[name])).warnings
    if FAMILIES[name].answers_end_with:
        assert warnings == ()
    else:
        [warning] = warnings
        assert "tokenizer_config.json (chat_template): the chat template writes no token that ends an answer" in warning


def test_the_warning_is_a_remark_about_the_index_and_stays_in_its_cache(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "llava", FAMILIES["llava"])
    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": f"a{i}"}]} for i in range(9)
    ]
    (tmp_path / "train.json").write_text(json.dumps(rows) + " " * (2 << 20))  # smaller files have no cache
    settings = tiny_recipe(folder, tmp_path / "train.json", None, vocab=1024)
    cached = settings.data.model_copy(update={"index_cache": tmp_path / "cache"})
    for number_of_remarks in (2, 3):  # the encoder has nothing to learn from; the second time it comes from the cache
        index = build_index(settings.model_copy(update={"data": cached}))
        assert len(index.remarks()) == number_of_remarks
        assert any("writes no token that ends an answer" in remark for remark in index.remarks())


def test_a_slow_tokenizer_is_to_be_converted(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    assert "has tokenizer.model, but no tokenizer.json; convert the tokenizer once" in rejected(folder)
    (folder / "tokenizer.model").unlink()
    assert "has no tokenizer.json; expected the folder of a Hugging Face model" in rejected(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"])
def test_an_unreadable_file_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text("{nonsense")
    assert name in rejected(folder)


def test_tokens_that_only_the_settings_add_are_added_with_their_ids(folder: Path) -> None:
    size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    entry = {"content": "<|new|>", "special": True}
    change_config(folder, added_tokens_decoder={str(size): entry})
    assert load_tokenizer(folder).vocab_size == size + 1
    change_config(folder, added_tokens_decoder={str(size + 7): entry})
    assert f"'<|new|>' has the id {size + 7} in tokenizer_config.json" in rejected(folder)


def test_generation_ends_at_every_token_that_the_folder_names(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = [tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [ends[1]]}))
    assert load_tokenizer(folder).end_ids == set(ends)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [10**6]}))
    assert "no token with the id 1000000" in rejected(folder)


def test_answers_are_as_long_as_the_folder_permits(folder: Path) -> None:
    file = folder / "generation_config.json"
    for stated, limit in (({}, None), ({"max_length": 9}, 2), ({"max_length": 5}, 1), ({"max_new_tokens": 3}, 3)):
        file.write_text(json.dumps(stated | {"max_new_tokens": stated.get("max_new_tokens")}))
        assert load_tokenizer(folder).greedy.answer_limit(7) == limit
    for bad in (0, True, "8"):
        file.write_text(json.dumps({"max_length": bad}))
        assert f"`max_length` is {bad!r}, allowed: a number of at least 1" in rejected(folder)


def test_the_hash_of_a_folder_covers_what_decides_ids(folder: Path) -> None:
    before = tokenizer_sha256(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "generation_config.json").write_text("{}")
    assert tokenizer_sha256(folder) == before
    (folder / "config.json").write_text('{"image_token_id": 3}')
    with_image = tokenizer_sha256(folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    assert len({before, with_image, tokenizer_sha256(folder)}) == 3


def test_thoughts_of_earlier_answers_are_not_learned(tmp_path: Path) -> None:
    tokenizer = TemplateTokenizer.load(write_folder(tmp_path, FAMILIES["thinking"]))
    answers = ["<think>\nfirst\n</think>\n\nred", "<think>\nsecond\n</think>\n\ngreen"]
    turns = [("user", "a"), ("assistant", answers[0]), ("user", "b"), ("assistant", answers[1])]
    encoded = tokenizer.encode(sample(*turns), {})
    learned = text_of(tokenizer, encoded.labels[encoded.labels != IGNORE_INDEX])
    assert learned == f"red<|im_end|>{answers[1]}<|im_end|>"


def test_text_may_not_hold_the_characters_that_keep_text_and_tokens_apart(qwen_folder: Path) -> None:
    tokenizer = TemplateTokenizer.load(qwen_folder)
    with pytest.raises(BadConversationError, match=r"private-use character U\+10FFF2"):
        tokenizer.encode(sample(("user", "\U0010fff2"), ("assistant", "a")), {})


def test_a_line_break_at_a_mark_belongs_to_it(tmp_path: Path) -> None:
    tokenizer = TemplateTokenizer.load(write_folder(tmp_path, FAMILIES["llava"]))
    for text in ("<image>\nWhy?", "Why?\n<image>", "<image>Why?"):
        ids = tokenizer.prompt_ids(sample(("user", text), ("assistant", "a"), images=1), {"vision": [1]})
        assert text_of(tokenizer, ids).strip() == "USER: <image> \nWhy? ASSISTANT:"


def test_a_template_for_texts_gets_placeholders_in_its_texts(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<|image|>", normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    loaded = TemplateTokenizer.load(folder)
    encoded = loaded.encode(sample(("user", "a\n<image>\nb"), ("assistant", "c"), images=1), {"vision": [3]})
    assert "user\na\n<|image|><|image|><|image|>\nb<|im_end|>" in text_of(loaded, encoded.ids)


def test_a_family_may_write_text_around_features(tmp_path: Path) -> None:
    qwen_vl = FAMILIES["qwen2_vl"]
    special = (*qwen_vl.special, "<soft>", "<end_of_image>")
    folder = write_folder(tmp_path, replace(qwen_vl, special=special))
    markup = MediaMarkup("<|image_pad|>", "<soft>", prefix="\n\n", suffix="<end_of_image>\n\n")
    tokenizer = TemplateTokenizer.load(folder, {"image": markup})
    conversation = sample(("user", "a<image>b"), ("assistant", "c"), images=1)
    encoded = tokenizer.encode(conversation, {"vision": [2]})
    expected = "a<|vision_start|>\n\n<soft><soft><end_of_image>\n\n<|vision_end|>b"
    assert expected in text_of(tokenizer, encoded.ids)
    counts = tokenizer.length_counter(1000)(conversation, {"vision": [2]})
    assert counts == (len(encoded.ids), int((encoded.labels != IGNORE_INDEX).sum()))


def test_a_medium_that_the_template_drops_is_no_training_example(tmp_path: Path) -> None:
    qwen_vl = FAMILIES["qwen2_vl"]
    once = qwen_vl.template.replace("part.type == 'image'", "part.type == 'image' and loop.first")
    tokenizer = TemplateTokenizer.load(write_folder(tmp_path, replace(qwen_vl, template=once)))
    with pytest.raises(BadConversationError, match="writes 0 images, videos for 1"):
        tokenizer.encode(sample(("user", "a<image>"), ("assistant", "c"), images=1), {"vision": [1]})


def test_a_recipe_trains_on_conversations_through_the_template(
    tmp_path: Path, recipe: Callable[..., Recipe], picture: Callable[..., Path]
) -> None:
    picture("a.png", 16, 16)
    rows = [
        row("<image>\nWhat?", "red", "a.png", name="seen"),
        row("Why?", "no <|im_end|> here", name="forging"),
        row("first <image> then <image>", "green", "a.png", "a.png", name="two"),
    ]
    folder = write_folder(tmp_path / "model", FAMILIES["qwen2_vl"])
    made = recipe(rows, tokenizer=folder)
    made = made.model_copy(update={"model": _with_vocab(made, 1024)})
    index = build_index(made)
    assert not index.quarantined
    stream = GroupStream(index.lengths, Grouping(made.data.seq_len, 100, 2), seed=0)
    needs = (PayloadNeed("vision", 0, media=True), PayloadNeed("llm", 0, ids=True, labels=True))
    one_each = {"vision": 1, "llm": 1}
    request = StepRequest(0, one_each, {"vision": 1, "llm": 2}, needs)
    data = StepBuilder(index, stream, made).build(request)
    tokenizer = TemplateTokenizer.load(folder)
    places = 0
    for (_, microbatch), text in data.text.items():
        samples = data.meta.sample_id[data.meta.microbatch(0, microbatch)]
        expected = [tokenizer.encode(index.samples[s], index.media_features(s)) for s in samples]
        assert text.ids is not None
        assert text.labels is not None
        assert text.ids.tolist() == np.concatenate([e.ids for e in expected]).tolist()
        assert text.labels.tolist() == np.concatenate([e.labels for e in expected]).tolist()
        assert (text.ids[text.feature_positions["vision"]] == tokenizer.item_ids["vision"][0]).all()
        places += len(text.feature_positions["vision"])
    assert places == sum(sum(index.unit_features(s, "vision")) for s in data.meta.sample_id) > 0


def test_conversations_that_the_template_rejects_are_quarantined(tmp_path: Path, recipe: Callable[..., Recipe]) -> None:
    folder = write_folder(tmp_path / "model", FAMILIES["gemma"])
    turns = [("user", "a"), ("user", "b"), ("assistant", "c")]
    rows = [
        row("Why?", "red", name="good"),
        {"id": "bad", "messages": [{"role": role, "content": text} for role, text in turns]},
        {"id": "system", "system": "Be brief.", **row("Why?", "red")},
    ]
    made = recipe(rows, tokenizer=folder)
    made = made.model_copy(update={"model": _with_vocab(made, 1024).model_copy(update={"vision": None})})
    index = build_index(made)
    assert [s.id for s in index.samples] == ["good"]
    reasons = {q.id: (q.kind, q.reason.rpartition(": ")[2]) for q in index.quarantined}
    assert reasons == {
        "bad": ("chat_template", "Conversation roles must alternate"),
        "system": ("chat_template", "System role not supported"),
    }


def test_a_sample_of_which_the_template_loses_an_image_is_quarantined(tmp_path: Path) -> None:
    """And no other: its image tokens would not be as many as its features."""
    template = FAMILIES["llava"].template
    loop = "message['content'] | selectattr('type', 'equalto', 'image')"
    assert loop in template
    first_only = template.replace(loop, f"({loop} | list)[:1]")
    folder = write_folder(tmp_path / "llava", FAMILIES["llava"], chat_template=first_only)
    Image.new("RGB", (16, 16)).save(tmp_path / "x.png")
    rows = [row("<image>q", "a", "x.png"), row("<image><image>q", "a", "x.png", "x.png")]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    made = tiny_recipe(folder, tmp_path / "train.json", None, vocab=1024)
    index = build_index(made.model_copy(update={"data": made.data.model_copy(update={"max_bad_rate": 0.5})}))
    assert len(index.samples) == 1
    [bad] = index.quarantined
    assert (bad.kind, bad.index) == ("chat_template", 1)
    assert "the chat template writes 1 images, videos for 2" in bad.reason


def test_the_vocabulary_of_the_model_covers_the_special_tokens(folder: Path, recipe: Callable[..., Recipe]) -> None:
    made = recipe([row("Why?", "red")], tokenizer=folder)
    with pytest.raises(DataError, match=r"model\.llm\.vocab is 512, but .*set model\.llm\.vocab to at least \d+"):
        build_index(made)
    made = made.model_copy(update={"model": _with_vocab(made, 1024)})
    with pytest.raises(DataError, match=r"no token for the features of model\.vision: .*does not say which token"):
        build_index(made)


def _with_vocab(recipe: Recipe, vocab: int) -> ModelSettings:
    return recipe.model.model_copy(update={"llm": recipe.model.llm.model_copy(update={"vocab": vocab})})
