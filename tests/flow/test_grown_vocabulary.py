"""A run whose tokenizer has more tokens than the folder it starts from: on four ranks, killed, resumed and exported."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer

from mmtrain.checkpoint import open_newest_good
from mmtrain.data import build_index, load_tokenizer
from mmtrain.families import FAMILIES
from mmtrain.families.family import TINY_VOCAB_SIZE
from mmtrain.planning.whatif import plan_again
from mmtrain.recipe import LoadedRecipe, load_recipe
from mmtrain.report import read_metrics
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, load_run_recipe
from mmtrain.runtime.training.train_request import TrainRequest
from mmtrain.weights import export_folder
from mmtrain.weights.tiny_model import write_tiny_model
from tests.distributed import RanksFailed
from tests.faults import FailAt
from tests.flow.runs import assert_same_end, refuse, run_all
from tests.forked_command import run_forked
from tests.plans import plan_recipe as planner

NUM_TOKENS = TINY_VOCAB_SIZE + 70  # more than pad the vocabulary of a tiny model
NUM_STEPS = 4
RECIPE = """
name: grown
model: {{hf: {folder}}}
data:
  sources: [{{path: {folder}/conversations/some.json}}]
  validation: [{{path: {folder}/conversations/others.json}}]
  seq_len: 256
  workers: 0
parallel: {{llm: {{tp: 2, pp: 2}}}}
cluster: {{hardware: cpu-core}}
train:
  steps: 4
  global_batch: 4
  validate_every: 4
  checkpoint: {{every: 2}}
  optimizer: {{lr: 1.0e-3}}
"""


def _add_tokens(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Make the commonest words of the conversations the last of `NUM_TOKENS` tokens."""
    words = Counter(word for row in rows for turn in row["messages"] for word in turn["content"].split())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    common = [word for word, _ in words.most_common(30) if tokenizer.token_to_id(word) is None]
    num_rare = NUM_TOKENS - tokenizer.get_vocab_size() - len(common)
    tokens = [*(f"<rare {i}>" for i in range(num_rare)), *common]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert tokenizer.token_to_id(common[-1]) == NUM_TOKENS - 1


def _loss_of_transformers(loaded: LoadedRecipe, folder: Path) -> float:
    """Return the mean loss per target of the held-out samples, with the model and the tokenizer of a folder."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    total, num_targets = 0.0, 0
    for sample in build_index(loaded.recipe, "validation").samples:
        encoded = tokenizer.encode(sample, {})
        labels = torch.from_numpy(encoded.labels)
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(encoded.ids)[None]).logits[0]
        total += float(F.cross_entropy(logits, labels, reduction="sum"))
        num_targets += int((labels >= 0).sum())
    return total / num_targets


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_grown_model_trains_is_resumed_and_opened_by_transformers(family: str, tmp_path: Path) -> None:
    """The embeddings of one family are tied, over two pipeline ranks."""
    folder = tmp_path / "model"
    write_tiny_model(FAMILIES[family], folder, seed=0)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["tie_word_embeddings"] = family == "qwen2"
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rows = json.loads((folder / "conversations" / "train.json").read_text(encoding="utf-8"))
    for name, chosen in (("some", rows[:48]), ("others", rows[48:60])):
        (folder / "conversations" / f"{name}.json").write_text(json.dumps(chosen), encoding="utf-8")
    _add_tokens(folder, rows)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=folder), encoding="utf-8")

    refused = run_forked(tmp_path, "train", str(recipe))
    assert refused.returncode == 2
    assert f"set model.llm.vocab to at least {NUM_TOKENS} if this is the model's tokenizer" in refused.stderr

    loaded = load_recipe(recipe, [f"model.llm.vocab={NUM_TOKENS}"], env={})
    unbroken, broken = (
        TrainRequest(loaded, planner, plan_again, "cpu-core", 4, tmp_path / name) for name in ("unbroken", "broken")
    )
    assert run_all(*[unbroken] * 4) == [""] * 4
    with pytest.raises(RanksFailed):
        run_all(*[broken] * 4, faults=FailAt(3, 3, "kill"))
    broken = TrainRequest(loaded, planner, plan_again, "cpu-core", 4, broken.run_dir, resume=True)
    assert run_all(*[broken] * 4) == [""] * 4
    assert_same_end(broken.run_dir, unbroken.run_dir, NUM_STEPS)

    checkpoint = open_newest_good(unbroken.run_dir / CHECKPOINTS_FOLDER, refuse)
    out = tmp_path / "out"
    export_folder(load_run_recipe(unbroken.run_dir), checkpoint, out)
    our_loss = read_metrics(unbroken.run_dir)[-1]["val_loss"]
    assert our_loss == pytest.approx(_loss_of_transformers(loaded, out), rel=1e-4)
