"""Generation with a KV cache gives the same tokens as computing the whole sequence again for every token."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from mmtrain.models.attention import Spans
from mmtrain.models.attention.kv_cache import KVCache
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.stage.generation import next_tokens
from mmtrain.models.stage.stage_inputs import TextInput
from mmtrain.models.stage.stage_module import StageModule
from mmtrain.recipe.settings.model_settings import ModelSettings
from tests.distributed import run_ranks
from tests.models.factory import DEEPSTACK, GROWING, settings, stage
from tests.models.whole_tensors import stage_logits

LIMIT, NUM_NEW = 83, 9  # ids from 83 up are padding of the vocabulary
ENDS = {64, 33, 30, 16}  # any of these ends an answer
PROMPTS = [[5, 11, 2, 40, 8], [9], [17, 3, 3, 61, 20, 33, 1, 6], [5, 11, 2, 40, 8]]
PLACES = [1, 6, 7]  # places, of all prompts together, that features take
MODELS = {
    "grouped": settings(llm={"qkv_bias": True}),
    "windows": settings(
        llm={"window": 4, "full_attention_blocks": (1,), "window_rope_base": 50.0, "query_scale": 5, "qk_norm": True}
    ),
    "deepstack": settings(vision=DEEPSTACK),
    "growing queries": settings(llm=GROWING),
    "images see both ways": settings(
        llm={"window": 4, "full_attention_blocks": (1,), "image_attention": "bidirectional"}
    ),
    "tied, one kv head": settings(llm={"kv_heads": 1, "tie_embeddings": True}),
}


@torch.no_grad()
def write(llm: StageModule, num_new: int = NUM_NEW) -> list[list[int]]:
    """Continue all prompts together, one token at a time; a sequence that ends leaves the batch."""
    memory = KVCache(max(map(len, PROMPTS)) + num_new, (0,) * len(PROMPTS))
    answers: list[list[int]] = [[] for _ in PROMPTS]
    open_ = list(range(len(PROMPTS)))
    new = PROMPTS
    features = {"vision": _features(llm)}
    for _ in range(num_new):
        lengths = tuple(map(len, new))
        ids = torch.tensor([token for tokens in new for token in tokens])
        spans = _spans(llm, PLACES) if features else ()
        inputs = TextInput(lengths, ids, None, {"vision": torch.tensor(PLACES)}, kv_cache=memory, image_spans=spans)
        chosen = next_tokens(llm, None, inputs, features, LIMIT).tolist()
        memory.advance(lengths)
        for sequence, token in zip(open_, chosen, strict=True):
            answers[sequence].append(token)
        goes_on = [i for i, token in enumerate(chosen) if token not in ENDS]
        memory.select_sequences(goes_on)
        open_, new, features = [open_[i] for i in goes_on], [[chosen[i]] for i in goes_on], {}
        if not open_:
            break
    return answers


@torch.no_grad()
def write_anew(llm: StageModule) -> list[list[int]]:
    answers = []
    begins = [sum(map(len, PROMPTS[:i])) for i in range(len(PROMPTS))]
    for begin, prompt in zip(begins, PROMPTS, strict=True):
        mine = [i for i, place in enumerate(PLACES) if begin <= place < begin + len(prompt)]
        rows = [PLACES[i] - begin for i in mine]
        places = {"vision": torch.tensor(rows, dtype=torch.int64)}
        ids = list(prompt)
        while len(ids) < len(prompt) + NUM_NEW and (len(ids) == len(prompt) or ids[-1] not in ENDS):
            inputs = TextInput((len(ids),), torch.tensor(ids), None, places, image_spans=_spans(llm, rows))
            ids.append(int(stage_logits(llm, None, inputs, {"vision": _features(llm)[mine]})[-1, :LIMIT].argmax()))
        answers.append(ids[len(prompt) :])
    return answers


def _spans(llm: StageModule, places: Sequence[int]) -> Spans:
    """Return the images of prompts that have at most one each, if their tokens see each other."""
    if not llm.units_with_spans:
        return ()
    first_of_run = [place for place in places if place - 1 not in places]
    return tuple((place, place + 1 + (place + 1 in places)) for place in first_of_run)


def _features(llm: StageModule) -> torch.Tensor:
    width = llm.shape.layers[0].out_width
    return torch.randn(len(PLACES), width, generator=torch.Generator().manual_seed(3))


def _model(model: ModelSettings, groups: ParallelGroups | None = None, sp: bool = False) -> StageModule:
    """Build an LLM whose blocks outweigh its embedding, so that answers vary."""
    llm = stage(model, "llm", groups=groups, sequence_parallel=sp, attention="reference")
    with torch.no_grad():
        for name, param in llm.named_parameters():
            if "linear_proj" in name or "linear_fc2" in name:
                param *= 8
    return llm


@pytest.mark.parametrize("name", MODELS)
def test_generation_with_a_cache_gives_the_same_tokens(name: str) -> None:
    llm = _model(MODELS[name])
    expected = write_anew(llm)
    assert len({token for answer in expected for token in answer}) > 6, "answers vary"
    assert expected[0] != expected[3], "features change the answer"
    assert len({len(answer) for answer in expected}) > 1, "some end before others"
    assert write(llm) == expected
    assert write(llm, num_new=1) == [answer[:1] for answer in expected]


def _on_ranks(names: Sequence[str]) -> list[list[list[int]]]:
    groups = replace(ParallelGroups.single(), tp=dist.group.WORLD)
    return [write(_model(MODELS[name], groups, sp)) for name in names for sp in (False, True)]


def test_tensor_parallel_ranks_choose_the_same_tokens() -> None:
    """Choose tokens also with sequence parallelism, whose token shards are padded if they do not divide."""
    expected = [write_anew(_model(model)) for model in MODELS.values() for _ in (False, True)]
    assert run_ranks(2, _on_ranks, list(MODELS)) == [expected, expected]


def _equal_logits() -> list[list[int]]:
    groups = replace(ParallelGroups.single(), tp=dist.group.WORLD)
    factory = stage(MODELS["grouped"], "llm", groups=groups).factory
    rank, size = groups.tp_rank, groups.tp_size
    rows = torch.zeros(4, 12)
    rows[1, [3, 7]], rows[2, [5, 11]], rows[3, 11] = 1.0, -0.5, 9.0
    rows[2, 0] = float("-inf")
    mine = rows.chunk(size, dim=1)[rank]
    return [factory.greedy_tokens(mine, limit).tolist() for limit in (12, 11, 6, 2)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_of_equal_logits_the_lowest_id_wins_on_any_number_of_ranks(ranks: int) -> None:
    expected = [[0, 3, 1, 11], [0, 3, 1, 0], [0, 3, 1, 0], [0, 0, 1, 0]]
    assert run_ranks(ranks, _equal_logits) == [expected] * ranks
