"""A run that started from random weights is exported as a folder of the family that has its settings."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from mmtrain.checkpoint import open_newest_good
from mmtrain.data import ChatTokenizer, Sample, Turn, build_index, load_tokenizer
from mmtrain.data.synthetic.demo import generate_demo
from mmtrain.errors import UserError
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.models.stage.stage_inputs import TextInput
from mmtrain.planning.artifact.plan import StagePlan, UnitPlan
from mmtrain.recipe import Recipe
from mmtrain.runtime.evaluation.generate import load_generator
from mmtrain.runtime.evaluation.qa_eval import QuestionAnswerer, select_questions
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER
from mmtrain.runtime.world import World
from mmtrain.weights import export_folder
from mmtrain.weights.inspect_folder import inspect_folder
from tests.models.whole_tensors import stage_logits
from tests.runtime.models import CPU, randomize, recipe, run_folder, whole
from tests.weights.onevision_processor import ComposedProcessor

MAX_NEW_TOKENS = 12
CLIP = {
    "layers": 2, "hidden": 16, "heads": 2, "ffn": 32, "patch": 8, "max_side": 4, "positions": "grid",
    "class_token": True, "pre_norm": True, "post_norm": False, "patch_bias": False, "activation": "gelu_tanh",
}  # fmt: skip
SIGLIP = CLIP | {"class_token": False, "pre_norm": False, "patch_bias": True, "activation": "gelu"}
FIXED = {"scheme": "fixed", "size": 32, "fit": "stretch", "mean": (0.93, 0.93, 0.93), "std": (0.25, 0.25, 0.25)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "data"
    generate_demo(folder, seed=4, train=40, heldout=9)
    return folder


def _recipe(
    data: Path, image: dict[str, Any] | None = None, vision: dict[str, Any] | None = None, **llm: Any
) -> Recipe:
    """Make a recipe whose encoder is CLIP, or another one."""
    settings = recipe(data / "tokenizer.json", data / "train.json", data / "heldout.json", **llm).model_dump()
    settings["model"]["vision"] = vision or CLIP
    settings["data"]["image"] = FIXED | (image or {})
    return Recipe.model_validate(settings)


def _exported(settings: Recipe, folder: Path) -> Path:
    """Export a run whose weights are random, and far enough apart for varied answers."""
    units = whole(settings)
    randomize(units.values())
    run = run_folder(folder / "run", settings, units)
    export_folder(settings, open_newest_good(run / CHECKPOINTS_FOLDER, print), folder / "out")
    return folder / "out"


def our_answers(settings: Recipe, run: Path, max_new_tokens: int | None) -> dict[str, str]:
    """Return our answers to all held-out questions, by the id of the sample."""
    index, tokenizer = build_index(settings, "validation"), load_tokenizer(settings.data.tokenizer_path)
    ParallelGroups.single()
    world = World(0, 1, CPU)
    layout = {
        unit.name: UnitPlan(tp=1, pp=1, dp=1, ranks=(0,), stages=(StagePlan(stage=0, layers=(0, len(unit.layers))),))
        for unit in build_model_shape(settings).units
    }
    checkpoint = open_newest_good(run / CHECKPOINTS_FOLDER, print)
    generator = load_generator(settings, layout, world, checkpoint, tokenizer)
    answerer = QuestionAnswerer(generator, settings, tokenizer, index, world, max_new_tokens)
    answers, bad = answerer.answer(select_questions(index, None), blank=False)
    assert not bad
    return {question.sample.id: answer for question, answer in answers.items()}


def as_messages(sample: Sample) -> list[dict[str, Any]]:
    """Return the question of a sample as `transformers` reads it."""
    images = iter(sample.images)
    content: list[dict[str, Any]] = []
    for i, text in enumerate(sample.turns[0].text.split("<image>")):
        if i:
            content.append({"type": "image", "image": Image.open(next(images).path).convert("RGB")})  # type: ignore[attr-defined]
        if text:
            content.append({"type": "text", "text": text})
    return [{"role": "user", "content": content}]


def answer_of_transformers(model: Any, processor: Any, sample: Sample, max_new_tokens: int | None) -> str:
    """Let a LLaVA of `transformers` answer the question of a sample, greedily; None: as long as its folder permits."""
    inputs = processor.apply_chat_template(
        as_messages(sample), add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    unused = list(range(len(processor.tokenizer), model.config.text_config.vocab_size))  # ids that no text has
    limit = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
    ids = model.generate(**inputs, **limit, do_sample=False, suppress_tokens=unused or None)
    text: str = processor.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text.strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fit", "vision", "llm"),
    [
        ("stretch", CLIP, {}),
        ("crop", CLIP, {"tie_embeddings": True}),
        ("pad", CLIP, {"qkv_bias": True}),
        ("stretch", SIGLIP, {"qk_norm": True}),
    ],
)
def test_a_folder_gives_the_same_answers_in_transformers(
    fit: str, vision: dict[str, Any], llm: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    settings = _recipe(data, {"fit": fit}, vision, **llm)
    folder = _exported(settings, tmp_path)
    assert inspect_folder(folder).family == "llava"
    model = LlavaForConditionalGeneration.from_pretrained(folder).eval()
    processor = AutoProcessor.from_pretrained(folder, backend="pil")
    ours = our_answers(settings, tmp_path / "run", MAX_NEW_TOKENS)
    samples = build_index(settings, "validation").samples
    theirs = {sample.id: answer_of_transformers(model, processor, sample, MAX_NEW_TOKENS) for sample in samples}
    assert ours == theirs
    assert len(set(ours.values())) > 5, "equal answers to most questions prove little"


@pytest.mark.slow
def test_greedy_answers_follow_the_generation_settings_of_the_folder(data: Path, tmp_path: Path) -> None:
    """Of the folder that `data.tokenizer` names, as `generate` takes those of the folder of the model."""
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    settings = _recipe(data)
    folder = _exported(settings, tmp_path)
    of_folder = settings.model_copy(update={"data": settings.data.model_copy(update={"tokenizer": folder})})
    file = folder / "generation_config.json"
    plain = our_answers(of_folder, tmp_path / "run", MAX_NEW_TOKENS)
    generation = json.loads(file.read_text())
    ends = [generation["eos_token_id"], load_tokenizer(folder).encode(_asked("x"), {}).ids[3].item()]
    file.write_text(json.dumps(generation | {"repetition_penalty": 1.6, "eos_token_id": ends}))
    model = LlavaForConditionalGeneration.from_pretrained(folder).eval()
    processor = AutoProcessor.from_pretrained(folder, backend="pil")
    ours = our_answers(of_folder, tmp_path / "run", MAX_NEW_TOKENS)
    samples = build_index(of_folder, "validation").samples
    theirs = {sample.id: answer_of_transformers(model, processor, sample, MAX_NEW_TOKENS) for sample in samples}
    assert ours == theirs
    assert ours != plain

    index = build_index(of_folder, "validation")
    tokenizer = load_tokenizer(folder)
    prompts = [len(tokenizer.prompt_ids(s, index.media_features(i))) for i, s in enumerate(samples)]
    for limits in ({"max_new_tokens": 3}, {"max_length": max(prompts) + 3}):  # with shorter ones transformers raises
        file.write_text(json.dumps(generation | limits))
        model = LlavaForConditionalGeneration.from_pretrained(folder).eval()
        ours = our_answers(of_folder, tmp_path / "run", None)
        assert ours == {sample.id: answer_of_transformers(model, processor, sample, None) for sample in samples}


def _asked(text: str) -> Sample:
    return Sample("s", "f.json", 0, (Turn("user", text), Turn("assistant", "a")), ())


PINPOINTS = {
    "scheme": "pinpoints", "tile": 32, "pinpoints": ((32, 64), (64, 32), (64, 64)), "partial_patches": "drop",
    "mean": FIXED["mean"], "std": FIXED["std"],
}  # fmt: skip


class _ComposedForAnswers:
    """Has what `answer_of_transformers` needs of a processor, for LLaVA-OneVision."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.decode = self.tokenizer.decode
        self._composed = ComposedProcessor(folder)

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> dict[str, torch.Tensor]:
        return self._composed(messages, add_generation_prompt=options["add_generation_prompt"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "vision", "image", "llm"),
    [
        ("llava_next", CLIP, {}, {}),
        ("llava_next", SIGLIP, {}, {"qkv_bias": True}),
        (
            "llava_onevision",
            SIGLIP | {"max_joined_tiles": 3, "pool_frames": True},
            {"tile_several": False},
            {"qkv_bias": True},
        ),
    ],
)
def test_a_folder_of_a_model_that_joins_tiles_gives_the_same_answers_in_transformers(
    family: str, vision: dict[str, Any], image: dict[str, Any], llm: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    settings = _recipe(data, None, vision | {"join_tiles": True}, **llm).model_dump()
    settings["data"]["image"] = PINPOINTS | image
    settings["data"]["seq_len"] = 512
    recipe_of_tiles = Recipe.model_validate(settings)
    folder = _exported(recipe_of_tiles, tmp_path)
    assert inspect_folder(folder).family == family
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    is_composed = family == "llava_onevision"
    processor = _ComposedForAnswers(folder) if is_composed else AutoProcessor.from_pretrained(folder, backend="pil")
    ours = our_answers(recipe_of_tiles, tmp_path / "run", MAX_NEW_TOKENS)
    samples = build_index(recipe_of_tiles, "validation").samples
    theirs = {sample.id: answer_of_transformers(model, processor, sample, MAX_NEW_TOKENS) for sample in samples}
    assert ours == theirs
    assert len(set(ours.values())) > 5, "equal answers to most questions prove little"


LLAMA3_SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_positions": 64}


YARN = LLAMA3_SCALING | {"kind": "yarn", "amplitude": 1.5}
SHARED_EXPERT = {"experts": 4, "top_k": 2, "ffn": 16, "normalize": False, "shared_ffn": 24, "shared_gate": True}
GEMMA = {
    "mlp": "geglu", "qk_norm": True, "post_norms": True, "zero_centered_norms": True, "scale_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "llm"),
    [
        ("llama", {"rope_scaling": LLAMA3_SCALING}),
        ("llama", {"rope_scaling": {"kind": "linear", "factor": 2.0}}),
        ("qwen2", {"qkv_bias": True, "rope_scaling": YARN}),
        ("qwen3", {"qk_norm": True, "window": 16, "full_attention_blocks": (1,)}),
        ("mistral", {"window": 16}),
        ("qwen2_moe", {"qkv_bias": True, "moe": SHARED_EXPERT}),
        ("mixtral", {"moe": {"experts": 4, "top_k": 2, "ffn": 64}, "ffn": 64}),
        ("gemma3_text", GEMMA),
        ("gemma3_text", GEMMA | {"window": 16, "window_rope_base": 100.0, "query_scale": 7.0}),
    ],
)
def test_a_text_model_gives_the_same_logits_in_transformers(
    family: str, llm: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    llm = {"head_dim": 12, **llm}
    settings = recipe(data / "tokenizer.json", data / "train.json", None, **llm)
    settings = settings.model_copy(update={"model": settings.model.model_copy(update={"vision": None})})
    folder = _exported(settings, tmp_path)
    assert inspect_folder(folder).family == family
    units = whole(settings)
    randomize(units.values())
    ids = torch.randint(0, 300, (70,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        ours = stage_logits(units["llm"], None, TextInput((70,), ids))[:, :512]
        theirs = AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids[None]).logits[0]
    assert (ours - theirs).abs().max() < 1e-4
    assert theirs.std() > 0.1  # else the comparison would prove nothing


def test_ids_are_those_of_the_tokenizer_of_the_run(data: Path, tmp_path: Path) -> None:
    """In `transformers` and here, also where a text spells a special token."""
    from transformers import AutoTokenizer

    settings = _recipe(data)
    folder = _exported(settings, tmp_path)
    ours, here = ChatTokenizer.load(data / "tokenizer.json"), load_tokenizer(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    for sample in build_index(settings).samples:
        features = {"vision": [1] * len(sample.images)}
        expected = ours.encode(sample, features)
        again = here.encode(sample, features)
        assert (expected.ids.tolist(), expected.labels.tolist()) == (again.ids.tolist(), again.labels.tolist())
        messages = [*as_messages(sample), {"role": "assistant", "content": sample.answer}]
        assert expected.ids.tolist() == theirs.apply_chat_template(messages, return_dict=False)
    assert here.end_ids == ours.end_ids == {theirs.eos_token_id}
    assert here.item_ids == ours.item_ids == {"vision": (theirs.image_token_id,)}


def test_dtype_and_tokenizer_folder_of_the_recipe_are_kept(data: Path, tmp_path: Path) -> None:
    settings = _recipe(data)
    first = _exported(settings, tmp_path)
    again = settings.model_copy(update={"data": settings.data.model_copy(update={"tokenizer": first})})
    checkpoint = open_newest_good(tmp_path / "run" / CHECKPOINTS_FOLDER, print)
    written = export_folder(again, checkpoint, tmp_path / "again", "bf16", max_file_bytes=20_000)
    assert written.dtypes == ("bfloat16",)
    assert written.num_files > 1
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (first / name).read_bytes()
    configs = [json.loads((folder / "config.json").read_text()) for folder in (first, tmp_path / "again")]
    assert configs[0] | {"torch_dtype": "bfloat16"} == configs[1]
    assert configs[0]["torch_dtype"] == "float32"


def test_every_setting_that_no_family_has_is_named(data: Path, tmp_path: Path) -> None:
    settings = recipe(data / "tokenizer.json", data / "train.json", None)
    run = run_folder(tmp_path / "run", settings, whole(settings))
    checkpoint = open_newest_good(run / CHECKPOINTS_FOLDER, print)
    with pytest.raises(UserError) as caught:
        export_folder(settings, checkpoint, tmp_path / "out")
    error = str(caught.value)
    for line in (
        "the nearest is llava, from which these differ:",
        "model.vision.positions: is 'factorized'; allowed: 'grid'",
        "model.vision.post_norm: is True; allowed: False",
        "model.vision.merge: is 2; allowed: 1",
        "data.image.scheme: is 'native'; allowed: 'fixed'",
        "data.image.size: is 224; allowed: 64",
    ):
        assert line in error
    assert not (tmp_path / "out").exists()

    gelu = recipe(data / "tokenizer.json", data / "train.json", None, mlp="gelu")
    gelu = gelu.model_copy(update={"model": gelu.model.model_copy(update={"vision": None})})
    with pytest.raises(UserError, match=r"the nearest is llama, from which these differ:\n  model.llm.mlp: is 'gelu'"):
        export_folder(gelu, checkpoint, tmp_path / "out")


def test_units_that_no_family_has_are_named(data: Path) -> None:
    settings = recipe(data / "tokenizer.json", data / "train.json", None).model_dump()
    settings["model"]["audio"] = {"layers": 1, "hidden": 16, "heads": 2, "ffn": 32}
    with pytest.raises(UserError, match=r"no family of models has just the units vision, audio, llm; runs can be exp"):
        export_folder(Recipe.model_validate(settings), None, data / "out")  # type: ignore[arg-type]
