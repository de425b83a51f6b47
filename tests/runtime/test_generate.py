"""Generation against the plainest loop there is: one sample, one token, the whole model anew, the largest logit."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mmtrain.checkpoint import open_newest_good
from mmtrain.data.demo import generate as generate_demo
from mmtrain.data.index import build
from mmtrain.data.tokenize import ChatTokenizer
from mmtrain.errors import CheckpointError
from mmtrain.models.build import StageModule, build_stage
from mmtrain.models.inputs import TextInput, VisionInput
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.shape import shape
from mmtrain.recipe import Recipe
from mmtrain.runtime.evaluate import Question, load_pictures, questions_of
from mmtrain.runtime.generate import Model, Prompt, batches, build_model, generate, load_weights
from tests.runtime.models import randomize, recipe, save_in_halves

CPU = torch.device("cpu")
NEW_TOKENS = 12


class Naive:
    """One stage a unit, one sample at a time."""

    def __init__(self, settings: Recipe) -> None:
        whole = shape(settings)
        self.vision, self.llm = (self._whole(settings, whole.unit(unit)) for unit in ("vision", "llm"))
        randomize(self.stages)

    @staticmethod
    def _whole(settings, unit) -> StageModule:
        return build_stage(
            settings.model, shape(settings), unit.name, (0, len(unit.layers)), ParallelGroups.single(),
            dtype=torch.float32, device=CPU, recompute=frozenset(), seed=1, attention="reference",
        )  # fmt: skip

    @property
    def stages(self) -> list[StageModule]:
        return [self.vision, self.llm]

    def logits(self, prompt: Prompt, answer: list[int], image_id: int) -> torch.Tensor:
        ids = torch.tensor([*prompt.ids.tolist(), *answer])
        places = torch.from_numpy(np.flatnonzero(prompt.ids == image_id))
        features = {}
        if prompt.pictures:
            pixels = torch.from_numpy(np.concatenate([p.patches for p in prompt.pictures]))
            grids = [(p.rows, p.cols) for p in prompt.pictures]
            rows, cols = zip(*grids, strict=True)
            features["vision"] = self.vision(None, VisionInput(rows, cols, pixels))
        return self.llm.logits(None, TextInput((len(ids),), ids, None, {"vision": places}), features)[-1]

    @torch.no_grad()
    def answer(self, prompt: Prompt, tokenizer: ChatTokenizer) -> list[int]:
        answer: list[int] = []
        while len(answer) < NEW_TOKENS:
            token = int(self.logits(prompt, answer, tokenizer.image_id)[: tokenizer.vocab_size].argmax())
            if token == tokenizer.end_id:
                break
            answer.append(token)
        return answer


class Case:
    def __init__(self, folder: Path, tie_embeddings: bool) -> None:
        self.recipe = recipe(
            folder / "tokenizer.json", folder / "train.json", folder / "heldout.json", tie_embeddings=tie_embeddings
        )
        self.tokenizer = ChatTokenizer.load(folder / "tokenizer.json")
        self.questions: list[Question] = questions_of(build(self.recipe, "validation"), self.tokenizer, None)
        self.prompts = [Prompt(q.ids, load_pictures(q, self.recipe, blank=False)) for q in self.questions]
        self.naive = Naive(self.recipe)
        self.root = folder / f"checkpoints-{tie_embeddings}"
        save_in_halves(self.root, 7, self.naive.stages)

    def model(self) -> Model:
        model = build_model(self.recipe, CPU)
        load_weights(model, open_newest_good(self.root, pytest.fail))
        return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "data"
    generate_demo(folder, seed=2, train=40, heldout=24)
    return folder


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def case(request: pytest.FixtureRequest, folder: Path) -> Case:
    return Case(folder, request.param)


def test_answers_are_those_of_the_naive_loop(case: Case) -> None:
    counts = {len(prompt.pictures) for prompt in case.prompts}
    assert {0, 1} < counts  # text alone, one image, several
    tokenizer = ChatTokenizer.load(case.recipe.data.tokenizer)
    unstopped = [case.naive.answer(prompt, tokenizer) for prompt in case.prompts]
    assert len({tuple(answer) for answer in unstopped}) > len(unstopped) // 2
    # An untrained model never ends by itself: the token that ends must be one that it says.
    said = [token for answer in unstopped for token in set(answer)]
    tokenizer.end_id = max(sorted(set(said)), key=said.count)
    expected = [case.naive.answer(prompt, tokenizer) for prompt in case.prompts]
    assert len({len(answer) for answer in expected}) > 3
    assert generate(case.model(), case.prompts, tokenizer, NEW_TOKENS) == expected


def test_padding_of_the_vocabulary_is_never_said(case: Case) -> None:
    tokenizer = case.tokenizer
    with torch.no_grad():
        first = [int(case.naive.logits(prompt, [], tokenizer.image_id).argmax()) for prompt in case.prompts]
    assert max(first) >= tokenizer.vocab_size  # it would, if it could
    answers = generate(case.model(), case.prompts, tokenizer, 3)
    assert max(token for answer in answers for token in answer) < tokenizer.vocab_size


def test_an_image_token_in_an_answer_stands_for_no_picture(case: Case) -> None:
    text_only = [prompt for prompt in case.prompts if not prompt.pictures]
    tokenizer = ChatTokenizer.load(case.recipe.data.tokenizer)
    answers = {id(prompt): case.naive.answer(prompt, tokenizer) for prompt in text_only}
    said = next(token for p in text_only for token in answers[id(p)] if token not in p.ids)
    tokenizer.image_id = tokenizer.item_ids["vision"] = said
    prompts = [p for p in text_only if said not in p.ids]
    expected = [case.naive.answer(prompt, tokenizer) for prompt in prompts]
    assert any(tokenizer.image_id in answer for answer in expected)
    assert generate(case.model(), prompts, tokenizer, NEW_TOKENS) == expected


def test_weights_come_whole_out_of_pieces(case: Case) -> None:
    model = case.model()
    original = {f"{s.unit}.{n}": p for s in case.naive.stages for n, p in s.named_parameters()}
    loaded = {
        f"{s.unit}.{n}": p for s in (*model.encoders.values(), model.body, model.head) for n, p in s.named_parameters()
    }
    assert original.keys() == loaded.keys()
    assert all(torch.equal(original[name], loaded[name]) for name in original)


def test_a_model_that_the_checkpoint_does_not_fit_is_refused(case: Case) -> None:
    llm = case.recipe.model.llm.model_copy(update={"layers": 3})
    deeper = case.recipe.model_copy(update={"model": case.recipe.model.model_copy(update={"llm": llm})})
    with pytest.raises(CheckpointError, match=r"llm\.layers\.3\..*checkpoint"):
        load_weights(build_model(deeper, CPU), open_newest_good(case.root, pytest.fail))


def test_nothing_asked_is_nothing_answered(case: Case) -> None:
    assert generate(case.model(), [], case.tokenizer, NEW_TOKENS) == []
    assert generate(case.model(), case.prompts[:2], case.tokenizer, 0) == [[], []]


def test_batches_hold_all_sequences_once_within_their_size() -> None:
    lengths = np.random.default_rng(0).integers(1, 40, 200).tolist()
    dealt = batches([*lengths, 500], max_tokens=100)
    assert sorted(i for batch in dealt for i in batch) == list(range(201))
    assert dealt[-1] == [200]  # longer than allowed, and alone
    assert all(sum(lengths[i] for i in batch) <= 100 for batch in dealt[:-1])
    assert len(dealt) <= 2 * sum(lengths) / 100 + 1
    assert batches([], 100) == []
