"""Compare a model from a folder with `transformers`, and a folder with what is exported after its import."""

import hashlib
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmtrain.checkpoint import open_newest_good
from mmtrain.data import DataIndex
from mmtrain.data.text.sample_tokenizer import LengthCounter, SampleTokenizer
from mmtrain.families import read_model_folder
from mmtrain.families.weight_layouts import ParameterSource, respell
from mmtrain.models.build_stage import StageOptions, build_stage
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.optim.parameter_specs import WeightSource
from mmtrain.models.shapes.layer_shape import WITHOUT_GRADIENT
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.models.stage.stage_inputs import TextInput
from mmtrain.models.stage.stage_module import StageModule, StageSpec
from mmtrain.recipe import Recipe
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER
from mmtrain.weights import FolderTensors, PretrainedWeights, export_folder, open_pretrained
from mmtrain.weights.match_tensors import sources_in
from tests.models.factory import gradients
from tests.models.whole_tensors import stage_logits
from tests.runtime.models import run_folder
from tests.weights.pretrained import PATCH, VOCAB, specs_of


def pretrained_of(recipe: Recipe) -> PretrainedWeights:
    weights = open_pretrained(recipe)
    assert weights is not None
    return weights


def unit_stage(recipe: Recipe, unit: str = "llm") -> StageModule:
    """Build a unit of a recipe, as one stage with the weights of its folder."""
    return stage_from(recipe, pretrained_of(recipe), unit)


def stage_from(recipe: Recipe, weights: WeightSource, unit: str = "llm") -> StageModule:
    """Build a unit of a recipe as one stage, which starts from weights."""
    model = build_model_shape(recipe)
    options = StageOptions(torch.float32, torch.device("cpu"), 1, "reference", weights)
    spec = StageSpec(unit, (0, len(model.unit(unit).layers)))
    return build_stage(recipe.model, model, spec, ParallelGroups.single(), options)


def full_gradients(stage: StageModule) -> dict[str, Tensor]:
    """Return the gradients of an unsharded stage by plan-independent name, in the full view."""
    by_name = gradients(stage)
    specs = specs_of(stage)
    return {name: gradient.view(specs[name].full_shape) for name, gradient in by_name.items()}


def labels_of(ids: Sequence[Tensor], last_mark: int) -> Tensor:
    """Return the labels of packed samples, each token's successor; none where a mark of a medium follows.

    last_mark: marks are the tokens up to this one.
    """
    followers = [torch.cat([sample[1:], torch.tensor([-100])]) for sample in ids]
    return torch.cat([torch.where(of_sample <= last_mark, -100, of_sample) for of_sample in followers])


def assert_encoded_as_by_processor(
    processor: Any,
    messages: list[dict[str, Any]],
    ours: SampleTokenizer,
    count: LengthCounter,
    index: DataIndex,
    number: int,
) -> Mapping[str, Any]:
    """Compare ids, their number and the prompt of a sample with the processor's; return all that it makes.

    messages: of the sample with this number in the index. count: by `ours`.
    """
    sample = index.samples[number]
    expected: Mapping[str, Any] = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="np"
    )
    features = index.media_features(number, ours.writes_rows_apart)
    encoded = ours.encode(sample, features)
    assert encoded.ids.tolist() == expected["input_ids"][0].tolist()
    assert count(sample, features)[0] == len(encoded.ids) == index.lengths.tokens[number]
    prompt = processor.apply_chat_template(
        messages[:-1], tokenize=True, return_dict=True, return_tensors="np", add_generation_prompt=True
    )
    assert ours.prompt_ids(sample, features).tolist() == prompt["input_ids"][0].tolist()
    return expected


def assert_equal_logits_and_loss(
    llm: StageModule, text: TextInput, features: Mapping[str, Tensor], expected: Tensor
) -> None:
    """Compare logits and loss with `expected`, the logits of `transformers`; both losses go backward."""
    with torch.no_grad():
        logits = stage_logits(llm, None, text, features)[:, :VOCAB]
    assert (logits - expected).abs().max() < 1e-4
    assert expected.std() > 0.1  # else the comparison would prove nothing
    assert text.labels is not None
    loss = llm(None, text, features)
    their_loss = nn.functional.cross_entropy(expected, text.labels, reduction="sum")
    assert loss.item() == pytest.approx(their_loss.item(), rel=1e-5)
    loss.backward()
    their_loss.backward()


def assert_equal_gradients(
    folder: Path, theirs: nn.Module, ours: Mapping[str, Tensor], frozen: Collection[str] = ()
) -> None:
    """Compare the gradients of all tensors of a folder with ours, which are by name, in the full view.

    frozen: names of ours that never train.
    """
    read = read_model_folder(folder)
    expected = dict(_gradients_by_tensor(theirs))
    all_sources = sources_in(read, FolderTensors.of(folder))
    trained = [s for s in all_sources if s.name not in frozen and not s.name.endswith(WITHOUT_GRADIENT)]
    spelled = [respell(trained, spelling) for spelling in read.family.spellings]  # modules are named as in one of them
    sources = {source.name: source for source in max(spelled, key=lambda of_one: _num_named(of_one, expected))}
    assert sources.keys() == ours.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values() if gradient is not None)
    for name, source in sources.items():
        for block in source.blocks:
            gradient = expected[block.tensor]
            assert gradient is not None
            part = ours[name][tuple(slice(lo, hi) for lo, hi in block.view_box)]
            wanted = gradient[tuple(slice(lo, hi) for lo, hi in block.tensor_box)]
            wanted = (wanted.mT if block.is_transposed else wanted).reshape(part.shape)
            assert (part - wanted).norm() <= 1e-3 * max(float(wanted.norm()), 1e-3 * largest), block.tensor


def _gradients_by_tensor(model: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the gradients of a model by tensor of its folder.

    Of mixtures a folder has a tensor for each expert, which Mixtral's has under names of its own, or one for all.
    """
    is_mixtral = type(model).__name__.startswith("Mixtral")
    linears = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
    if not is_mixtral:
        linears = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    for module_name, param in model.named_parameters():
        name = module_name.replace(".mlp.", ".block_sparse_moe.") if is_mixtral else module_name
        prefix, _, kind = name.rpartition(".")
        yield name, param.grad
        if not prefix.endswith(".experts"):
            continue
        assert param.grad is not None
        for expert, gradient in enumerate(param.grad):
            for tensor, part in zip(linears[kind], gradient.chunk(len(linears[kind])), strict=True):
                yield f"{prefix}.{expert}.{tensor}.weight", part


def _num_named(sources: Iterable[ParameterSource], names: Container[str]) -> int:
    return sum(block.tensor in names for source in sources for block in source.blocks)


def content(folder: Path) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Return dtype, shape and hash of the bytes of every tensor of a folder."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                digest = hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
                tensors[name] = (str(tensor.dtype), tuple(tensor.shape), digest)
    return tensors


def rename_tensors(folder: Path, prefixes: Mapping[str, str]) -> None:
    """Write the tensors of a folder anew, with other prefixes in their names."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for prefix, replacement in prefixes.items():
        assert any(name.startswith(prefix) for name in tensors), prefix
        tensors = {
            replacement + name.removeprefix(prefix) if name.startswith(prefix) else name: value
            for name, value in tensors.items()
        }
    save_file(tensors, path, {"format": "pt"})


def export_again(folder: Path, recipe: Recipe, stages: Mapping[str, StageModule] | None = None) -> Path:
    """Export a run with the weights of its folder, or of `stages`, into a new folder beside it."""
    units = [unit.name for unit in build_model_shape(recipe).units]
    run = run_folder(folder.parent / "run", recipe, dict(stages or {unit: unit_stage(recipe, unit) for unit in units}))
    out = folder.parent / "out"
    export_folder(recipe, open_newest_good(run / CHECKPOINTS_FOLDER, print), out)
    return out


def patches_of(image: Tensor, patch: int = PATCH) -> Tensor:
    """Cut (3, height, width) into (patches, 3 * patch * patch), features ordered (channel, y, x)."""
    cut = image.unfold(1, patch, patch).unfold(2, patch, patch)  # (3, rows, cols, y, x)
    return cut.permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1)
