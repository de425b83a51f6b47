"""Every layout answers like the simplest loop, which computes the whole model again for each token of each sample."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.checkpoint import open_newest_good
from mmtrain.data import ChatTokenizer, DataIndex, build_index
from mmtrain.data.loading.batch_builder import find_media_positions
from mmtrain.data.media.vision_items import VisionItemDecoder
from mmtrain.data.synthetic.demo import generate_demo as generate_demo
from mmtrain.data.synthetic.demo import train_tokenizer
from mmtrain.data.text.greedy_settings import GreedySettings
from mmtrain.errors import CheckpointError
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.stage.stage_inputs import EncoderInput, TextInput
from mmtrain.planning.artifact.plan import UnitPlan
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.modalities import AUDIO
from mmtrain.recipe.settings.vision_settings import VisionSettings
from mmtrain.runtime.evaluation.generate import load_generator
from mmtrain.runtime.evaluation.qa_eval import QuestionAnswerer, batch_by_length, select_questions
from mmtrain.runtime.world import World
from tests.data.archives import load_log_mels
from tests.distributed import run_ranks
from tests.flow.cases import Mesh, plan
from tests.flow.runs import refuse
from tests.models.whole_tensors import stage_logits
from tests.pixels import normalized
from tests.runtime.models import CPU, randomize, recipe, save_in_halves, whole

Layout = dict[str, UnitPlan]
NUM_NEW = 12


class Naive:
    """Answers with one stage per unit, one sample at a time."""

    def __init__(self, settings: Recipe) -> None:
        self.settings, self.units = settings, whole(settings)
        self.index, self.tokenizer = build_index(settings, "validation"), ChatTokenizer.load(settings.data.tokenizer)
        randomize(self.units.values())

    @torch.no_grad()
    def answer(self, number: int, num_new: int, end: int | None) -> list[int]:
        features = self._features(number)
        answer: list[int] = []
        while len(answer) < num_new:
            token = int(self.logits(number, answer, features)[: self.tokenizer.vocab_size].argmax())
            if token == end:
                break
            answer.append(token)
        return answer

    def logits(self, number: int, answer: list[int], features: dict[str, torch.Tensor]) -> torch.Tensor:
        sample = self.index.samples[number]
        prompt = self.tokenizer.prompt_ids(sample, self.index.media_features(number))
        ids = torch.from_numpy(np.concatenate([prompt, np.array(answer, np.int64)]))
        places = {unit: torch.tensor(rows) for unit, rows in self._places(number, prompt).items() if unit in features}
        positions = None
        if self.settings.model.llm.rope_sections is not None:
            media = self.index.media_grids(number, "vision", 2, self.tokenizer.writes_items_apart)
            positions = torch.from_numpy(find_media_positions(ids.numpy(), self.tokenizer.item_ids["vision"], media))
        return stage_logits(self.units["llm"], None, TextInput((len(ids),), ids, None, places, positions), features)[-1]

    def _places(self, number: int, prompt: np.ndarray) -> dict[str, list[int]]:
        """Return the positions of each encoder's features: item by item, one encoder after another."""
        places: dict[str, list[int]] = {unit: [] for unit in self.settings.model.all_encoders}
        for modality, tokens in self.tokenizer.item_ids.items():
            free = iter(np.flatnonzero(np.isin(prompt, tokens)).tolist())
            encoders = [u for u, encoder in self.settings.model.all_encoders.items() if encoder.modality == modality]
            for position in range(len(self._grids(number, encoders[0])) if encoders else 0):
                for unit in encoders:
                    rows, cols = self._grids(number, unit)[position]
                    encoder = self.settings.model.all_encoders[unit]
                    cells_per_feature = encoder.cells_per_token * encoder.tokens_per_feature
                    places[unit] += [next(free) for _ in range(rows * cols // cells_per_feature)]
        return places

    def _features(self, number: int) -> dict[str, torch.Tensor]:
        sample = self.index.samples[number]
        features: dict[str, torch.Tensor] = {}
        audio = self.settings.model.audio
        for unit, encoder in self.settings.model.all_encoders.items():
            if not isinstance(encoder, VisionSettings) or not sample.images:
                continue
            pictures = VisionItemDecoder(self.settings.data.image, encoder.patch)
            grids = self._grids(number, unit)
            pairs = zip(sample.images, grids, strict=True)
            patches = np.concatenate([pictures.patches("image", image, 0, 1, grid) for image, grid in pairs])
            pixels = normalized(patches, self.settings.data.image)
            rows, cols = zip(*grids, strict=True)
            features[unit] = self.units[unit](None, EncoderInput(rows, cols, torch.from_numpy(pixels)))
        if audio and sample.clips:
            frames = tuple(rows for rows, _ in self._grids(number, "audio"))
            clips = zip(sample.clips, frames, strict=True)
            mels = np.concatenate([load_log_mels(clip, rows, audio.mel_bins) for clip, rows in clips])
            features["audio"] = self.units["audio"](
                None, EncoderInput(frames, (1,) * len(frames), torch.from_numpy(mels))
            )
        return features

    def _grids(self, number: int, unit: str) -> list[tuple[int, int]]:
        """Return the rows and columns of a sample's items."""
        items = self.index.lengths.items[unit]
        span = slice(items.first[number], items.first[number + 1])
        return list(zip(items.rows[span].tolist(), items.cols[span].tolist(), strict=True))


@dataclass(frozen=True)
class Case:
    """A checkpoint, questions, and the answers of the naive loop; it is pickled for the ranks."""

    settings: Recipe
    root: Path
    end: int  # an untrained model never ends by itself: the token that ends is one that it says
    expected: list[list[int]]
    num_params: int

    @classmethod
    def make(cls, settings: Recipe, root: Path) -> "Case":
        naive = Naive(settings)
        samples = range(len(naive.index.samples))
        unstopped = [naive.answer(n, NUM_NEW, None) for n in samples]
        assert len({tuple(answer) for answer in unstopped}) > len(unstopped) // 2
        said = [token for answer in unstopped for token in set(answer)]
        end = max(sorted(set(said)), key=said.count)
        expected = [answer[: answer.index(end)] if end in answer else answer for answer in unstopped]
        assert len({len(answer) for answer in expected}) > 3
        save_in_halves(root, 7, naive.units.values())
        return cls(settings, root, end, expected, _num_params(naive.units.values()))

    def open(self, layout: Layout, world: World) -> tuple[QuestionAnswerer, DataIndex, int]:
        """Build the rank's stages; also return how many parameters they have."""
        # Two of them: prompts end their turns as ever.
        tokenizer, ending = (ChatTokenizer.load(self.settings.data.tokenizer) for _ in range(2))
        ending.end_ids = frozenset({self.end})
        index = build_index(self.settings, "validation")
        generator = load_generator(self.settings, layout, world, open_newest_good(self.root, refuse), ending)
        held = _num_params([stage for unit in generator.units.values() for stage in unit.stages.values()])
        return QuestionAnswerer(generator, self.settings, tokenizer, index, world, NUM_NEW), index, held

    def on_rank(self, layouts: Sequence[Layout]) -> list[tuple[list[list[int]], list[list[int]], int]]:
        """Return the answers to all questions and to a single one, and the number of parameters, by layout."""
        world = World(dist.get_rank(), dist.get_world_size(), CPU)
        outcomes = []
        for layout in layouts:
            asker, index, held = self.open(layout, world)
            questions = select_questions(index, None)
            answers = [asker.generate(asked, blank=False) for asked in (questions, questions[3:4])]
            assert all(not bad for _, bad in answers)
            outcomes.append((*([*tokens.values()] for tokens, _ in answers), held))
        return outcomes


def _num_params(stages: Any) -> int:
    return sum(param.numel() for stage in stages for param in stage.parameters())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "data"
    generate_demo(folder, seed=2, train=40, heldout=24)
    return folder


def _seeing(folder: Path, **llm: Any) -> Recipe:
    return recipe(folder / "tokenizer.json", folder / "train.json", folder / "heldout.json", **llm)


@pytest.fixture(scope="module")
def seeing(folder: Path) -> Case:
    return Case.make(_seeing(folder), folder / "checkpoints")


@pytest.fixture(scope="module")
def tied(folder: Path) -> Case:
    """Images have rows and columns among the rotary positions, and embeddings are tied."""
    model = _seeing(folder, tie_embeddings=True, rope_sections=(1, 2, 1))
    return Case.make(model, folder / "checkpoints-tied")


@pytest.fixture(scope="module")
def hearing(folder: Path) -> Case:
    """Make questions with images, with clips, with both and with neither."""
    rows = json.loads((folder / "heldout.json").read_text())[:12]
    for i in range(5):
        wave = 0.3 * np.sin(2 * np.pi * 300 * (i + 1) * np.arange(1600 + 400 * i) / 8000)
        soundfile.write(folder / f"{i}.wav", wave, 8000)
        conversation = {
            "conversations": [{"from": "human", "value": "<audio>What is it?"}, {"from": "gpt", "value": "red"}]
        }
        rows.append({"audio": f"{i}.wav", **conversation})
    two_modalities = next(json.loads(json.dumps(row)) for row in rows if row.get("image"))
    two_modalities["conversations"][0]["value"] = "<audio>" + two_modalities["conversations"][0]["value"]
    rows.append({**two_modalities, "audio": "4.wav"})
    (folder / "heard.json").write_text(json.dumps(rows))
    tokenizer = train_tokenizer(turn["value"] for row in rows for turn in row["conversations"])
    tokenizer.add_special_tokens([AUDIO.placeholder])
    tokenizer.save(str(folder / "heard-tokenizer.json"))
    plain = recipe(folder / "heard-tokenizer.json", folder / "heard.json", folder / "heard.json").model_dump()
    unit = {"layers": 1, "hidden": 16, "heads": 2, "ffn": 32, "mel_bins": 20, "max_frames": 80, "downsample": 2}
    plain["model"]["audio"] = unit
    return Case.make(Recipe.model_validate(plain), folder / "checkpoints-hearing")


@pytest.fixture(scope="module")
def seeing_twice(folder: Path) -> Case:
    """Make a case of two encoders that both read every image."""
    plain = _seeing(folder).model_dump()
    fine = {"modality": "vision", "layers": 1, "hidden": 16, "heads": 2, "ffn": 32, "patch": 16, "max_side": 4}
    plain["model"]["encoders"] = {"fine": fine}
    return Case.make(Recipe.model_validate(plain), folder / "checkpoints-twice")


LLM_STAGES = (1, 2, 3)  # cuts of an LLM of embedding, two blocks and head into one layer a stage
LAYOUTS: dict[str, tuple[str, dict[str, Mesh]]] = {
    "one rank": ("seeing", {"vision": Mesh((), (0,)), "llm": Mesh((), (0,))}),
    "disaggregated": ("seeing", {"vision": Mesh((), (0,)), "llm": Mesh((), (1,))}),
    "unified pp 2": ("seeing", {"vision": Mesh((), (0,)), "llm": Mesh((2,), (0, 1))}),
    "colocated": ("seeing", {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((2,), (0, 1))}),
    "tp 2": ("seeing", {"vision": Mesh((), (0, 1), tp=2), "llm": Mesh((), (0, 1), tp=2)}),
    "tp 1:2 on the same ranks": ("seeing", {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((), (0, 1), tp=2)}),
    "dp 2": ("seeing", {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((), (0, 1), dp=2)}),
    "vpp 2": ("seeing", {"vision": Mesh((), (0,)), "llm": Mesh(LLM_STAGES, (0, 1), vpp=2)}),
    "tied pp 2": ("tied", {"vision": Mesh((1,), (0, 1)), "llm": Mesh((3,), (0, 1))}),
    "dp 1:2": ("seeing", {"vision": Mesh((), (0,)), "llm": Mesh((), (1, 2), dp=2)}),
    "three units": ("hearing", {"vision": Mesh((), (0,)), "audio": Mesh((), (1,)), "llm": Mesh((), (2,))}),
    "two image encoders": ("seeing_twice", {
        "vision": Mesh((), (0,)), "fine": Mesh((1,), (1, 2)), "llm": Mesh((), (0,)),
    }),
    "pp 4": ("seeing", {"vision": Mesh((), (0,)), "llm": Mesh(LLM_STAGES, (0, 1, 2, 3))}),
    "dp 2:1 tp 1:2": ("seeing", {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((), (2, 3), tp=2)}),
    "colocated tp 2": ("seeing", {
        "vision": Mesh((), (0, 1, 2, 3), tp=2, dp=2), "llm": Mesh((1,), (0, 1, 2, 3), tp=2),
    }),
    "dp 2 pp 2": ("seeing", {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((2,), (0, 1, 2, 3), dp=2)}),
    "three units dp 2:1:2": ("hearing", {
        "vision": Mesh((), (0, 1), dp=2), "audio": Mesh((), (2,)), "llm": Mesh((), (2, 3), dp=2),
    }),
    "dp 2:3": ("seeing", {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((), (2, 3, 4), dp=3)}),
    "tp 2 pp 3": ("tied", {"vision": Mesh((), (0, 1), tp=2), "llm": Mesh((1, 3), (2, 3, 4, 5, 6, 7), tp=2)}),
}  # fmt: skip


def _world_size(name: str) -> int:
    return len({rank for mesh in LAYOUTS[name][1].values() for rank in mesh.ranks})


QUICK_SIZES = (1, 2)  # ranks


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(size, marks=() if size in QUICK_SIZES else pytest.mark.slow)
        for size in sorted({_world_size(name) for name in LAYOUTS})
    ],
)
def test_every_layout_answers_as_the_naive_loop(size: int, request: pytest.FixtureRequest) -> None:
    names = [name for name in LAYOUTS if _world_size(name) == size]
    for fixture in dict.fromkeys(LAYOUTS[name][0] for name in names):
        case: Case = request.getfixturevalue(fixture)
        mine = [name for name in names if LAYOUTS[name][0] == fixture]
        layouts = [plan(case.settings, **LAYOUTS[name][1]).units for name in mine]
        ranks = run_ranks(size, case.on_rank, layouts)
        for i, name in enumerate(mine):
            for answers, single, _ in (outcomes[i] for outcomes in ranks):
                assert answers == case.expected, name
                assert single == case.expected[3:4], name
            held = [outcomes[i][2] for outcomes in ranks]
            replicas = min(mesh.dp for mesh in LAYOUTS[name][1].values())
            assert replicas * case.num_params <= sum(held), name
            if size > 1 and replicas == 1:
                assert max(held) < case.num_params, f"{name}: no rank holds the whole model"


@pytest.mark.slow
def test_ranks_that_share_a_copy_answer_as_the_naive_loop(seeing: Case) -> None:
    """Shards (`replicated`), whole, and with tensor or context parallelism inside."""
    degrees = {"alone": {}, "tp": {"tp": 2}, "cp": {"cp": 2}, "ring": {"cp": 2, "method": "ring", "split": "even"}}
    layouts, names = [], []
    for name, sizes in degrees.items():
        ranks, inside = (0, 1, 2, 3), 2 if sizes else 1
        meshes = {
            "vision": Mesh((), ranks, tp=sizes.get("tp", 1), dp=4 // sizes.get("tp", 1)),
            "llm": Mesh((), ranks, dp=4 // inside, **sizes),
        }
        for shard in (2, None) if "tp" in sizes else (2, 4, None):
            layouts.append(plan(seeing.settings, shard=shard, dispatch="llm", **meshes).units)
            names.append(f"{name}, shard {shard}")
    for rank, outcomes in enumerate(run_ranks(4, seeing.on_rank, layouts)):
        for name, (answers, single, _) in zip(names, outcomes, strict=True):
            assert answers == seeing.expected, f"rank {rank}: {name}"
            assert single == seeing.expected[3:4], f"rank {rank}: {name}"


def _alone(case: Case) -> tuple[QuestionAnswerer, DataIndex]:
    ParallelGroups.single()
    layout = plan(case.settings, **LAYOUTS["one rank"][1]).units
    asker, index, _ = case.open(layout, World(0, 1, CPU))
    return asker, index


def test_an_image_token_in_an_answer_stands_for_no_picture(seeing: Case) -> None:
    naive = Naive(seeing.settings)
    text_only = [n for n, sample in enumerate(naive.index.samples) if not sample.images]
    answers = {n: naive.answer(n, NUM_NEW, None) for n in text_only}
    shared = set().union(*(naive.tokenizer.prompt_ids(naive.index.samples[n], {}).tolist() for n in text_only))
    said = next(token for n in text_only for token in answers[n][:-1] if token not in shared)
    saying = [n for n in text_only if said in answers[n]]
    case = Case(seeing.settings, seeing.root, -1, [], 0)
    asker, index = _alone(case)
    asker._tokenizer.item_ids["vision"] = (said,)
    generated, _ = asker.generate(
        [question for question in select_questions(index, None) if question.number in saying], blank=False
    )
    assert list(generated.values()) == [answers[n] for n in saying]


def test_a_model_that_the_checkpoint_does_not_fit_is_refused(seeing: Case) -> None:
    llm = seeing.settings.model.llm.model_copy(update={"layers": 3})
    model = seeing.settings.model.model_copy(update={"llm": llm})
    deeper = Case(seeing.settings.model_copy(update={"model": model}), seeing.root, 0, [], 0)
    with pytest.raises(CheckpointError, match=r"llm\.layers\.3\..*checkpoint"):
        _alone(deeper)


def test_no_questions_give_no_answers(seeing: Case) -> None:
    asker, _ = _alone(seeing)
    assert asker.generate([], blank=False) == ({}, [])


def test_answers_do_not_depend_on_the_other_questions_of_a_batch(seeing: Case) -> None:
    asker, index = _alone(seeing)
    questions = select_questions(index, None)
    together, _ = asker.generate(questions, blank=False)
    assert [asker.generate([question], blank=False)[0][question] for question in questions] == [*together.values()]
    blind, _ = asker.generate(questions, blank=True)
    changed = [question for question in questions if blind[question] != together[question]]
    assert len(changed) > 5
    assert all(question.images for question in changed)


@pytest.mark.parametrize("limits", [{"max_new_tokens": 3}, {"max_length": 40}, {"max_new_tokens": 5, "max_length": 2}])
def test_an_answer_is_as_long_as_the_folder_of_the_tokenizer_permits(limits: dict[str, int], seeing: Case) -> None:
    """Of both limits the first counts, as in transformers. A limit of ours goes before both."""
    asker, index = _alone(seeing)
    questions = select_questions(index, None)
    asker._tokenizer.greedy = GreedySettings(**limits)
    assert list(asker.generate(questions, blank=False)[0].values()) == seeing.expected
    asker._max_new_tokens = None
    prompts = [len(asker._tokenizer.prompt_ids(q.sample, index.media_features(q.number))) for q in questions]
    longest = [limits.get("max_new_tokens", max(1, 40 - prompt)) for prompt in prompts]
    unlimited = Naive(seeing.settings)
    expected = [unlimited.answer(q.number, most, seeing.end) for q, most in zip(questions, longest, strict=True)]
    assert list(asker.generate(questions, blank=False)[0].values()) == expected
    assert len({len(answer) for answer in expected}) > 1
    if "max_new_tokens" not in limits:
        assert max(longest) > NUM_NEW, "some answers are longer than before"


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 6), st.integers(1, 100))
def test_questions_are_dealt_evenly_to_ranks(sizes: list[int], ways: int, max_tokens: int) -> None:
    rounds = batch_by_length(sizes, ways, max_tokens)
    batches = [batch for batches in rounds for batch in batches]
    assert all(len(batches) == ways for batches in rounds)
    assert sorted(i for batch in batches for i in batch) == list(range(len(sizes)))
    assert len(rounds) == -(-sum(sizes) // (ways * max_tokens))
    loads = [sum(sizes[i] for i in batch) for batch in batches]
    longest = max(sizes, default=0)
    mean = sum(sizes) / max(1, len(batches))
    assert all(abs(load - mean) < longest for load in loads)
    assert all(load < max_tokens + longest for load in loads)
    in_order = [sizes[i] for batch in batches for i in batch]
    assert in_order == sorted(in_order), "sequences of a batch are of similar length"
