"""Folders of torch.distributed.checkpoint: read by torch, read from what torch saved, and refused."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from mmtrain.checkpoint import Ranks, Shard, ShardSpec, Snapshot, open_newest_good, save
from mmtrain.errors import ModelFolderError, UserError
from mmtrain.models.stage.stage_module import StageModule
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.train_settings import LoraSettings
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER
from mmtrain.runtime.training.start_weights import check_start_weights
from mmtrain.weights import open_dcp
from mmtrain.weights.dcp_folder import DcpFolder
from tests.cli.conftest import RunMmtrain, run_mmtrain
from tests.runtime.models import run_folder
from tests.weights.comparison import stage_from, unit_stage
from tests.weights.pretrained import VOCAB, llama, mixtral, qwen2, qwen3_moe, recipe_from, specs_of
from tests.weights.pretrained import save as save_model

__all__ = ["run_mmtrain"]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # in calls of torch itself

MODELS = {"qwen2": qwen2, "llama": llama, "mixtral": mixtral, "qwen3_moe": qwen3_moe}
MOMENTS = ("exp_avg", "exp_avg_sq")
NUM_UPDATES = 9


def values_for(stage: StageModule, seed: int) -> dict[str, Tensor]:
    """Draw values for every parameter of a stage, in the full view, by plan-independent name."""
    generator = torch.Generator().manual_seed(seed)
    values = {spec.name: torch.randn(spec.full_shape, generator=generator) for spec in specs_of(stage).values()}
    for name in ("llm.layers.0.table.weight", f"llm.layers.{len(stage.shape.layers) - 1}.output.weight"):
        if name in values:
            values[name][VOCAB:] = 0  # rows that pad the vocabulary have no gradient
    return values


def save_run(folder: Path, recipe: Recipe, tensors: dict[str, Tensor]) -> Path:
    """Make the folder of a run with a checkpoint of these tensors."""
    run = run_folder(folder, recipe)
    shards = [Shard(name, ShardSpec(tuple(values.shape)), values) for name, values in tensors.items()]
    snapshot = Snapshot(7, shards, {"num_updates": NUM_UPDATES})
    save(run / CHECKPOINTS_FOLDER, snapshot, keep=1, ranks=Ranks.alone())
    return run


@pytest.fixture(params=["qwen2", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def trained(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Recipe, StageModule, dict[str, dict[str, Tensor]]]:
    """Return a recipe, its LLM, and drawn weights and moments by kind; a run with them is in the folder `run`."""
    recipe = recipe_from(save_model(MODELS[request.param](), tmp_path / "model"))
    stage = unit_stage(recipe)
    kinds = {kind: values_for(stage, seed) for seed, kind in enumerate(("", *MOMENTS))}
    tensors = {f"{name}#{kind}".rstrip("#"): values for kind in kinds for name, values in kinds[kind].items()}
    save_run(tmp_path / "run", recipe, tensors)
    return recipe, stage, kinds


def exported_dcp(run_mmtrain: RunMmtrain, folder: Path) -> Path:
    done = run_mmtrain("export", folder / "run", "--out", folder / "dcp", "--format", "dcp")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{folder / 'dcp'}: weights after step 7, ")
    assert f"--set train.init_from={folder / 'dcp'} --set train.init_optimizer=true" in done.stdout
    return folder / "dcp"


def test_torch_reads_weights_and_moments_as_export_lays_them_out(
    trained: Any, tmp_path: Path, run_mmtrain: RunMmtrain
) -> None:
    """A moment lies as a weight does, so a run whose weights are the moments is exported as the oracle."""
    recipe, _, kinds = trained
    folder = exported_dcp(run_mmtrain, tmp_path)
    expected: dict[str, Tensor] = {}
    for kind, values in kinds.items():
        run = save_run(tmp_path / f"run{kind}x", recipe, values)
        out = tmp_path / f"hf{kind}"
        assert run_mmtrain("export", run, "--out", out, "--dtype", "fp32").returncode == 0
        tensors = load_file(out / "model.safetensors")
        expected |= {f"optimizer.state.{name}.{kind}" if kind else f"model.{name}": x for name, x in tensors.items()}
    names = [name.removeprefix("model.") for name in expected if name.startswith("model.")]
    expected |= {f"optimizer.state.{name}.step": torch.tensor(float(NUM_UPDATES)) for name in names}
    read = {name: torch.full_like(x, 7.0) for name, x in expected.items()}
    dcp_load(read, checkpoint_id=folder, no_dist=True)
    assert [name for name in expected if not torch.equal(read[name], expected[name])] == []
    assert FileSystemReader(folder).read_metadata().state_dict_metadata.keys() == expected.keys()


def test_torch_turns_the_folder_into_a_nested_state_dict(trained: Any, tmp_path: Path, run_mmtrain: RunMmtrain) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(exported_dcp(run_mmtrain, tmp_path), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state.keys() == {"model", "optimizer"}
    name = "model.norm.weight"
    assert state["optimizer"]["state"][name].keys() == {*MOMENTS, "step"}
    stored = DcpFolder(tmp_path / "dcp")
    assert torch.equal(state["model"][name], stored.read(f"model.{name}", ((0, 48),)))


def test_a_rank_starts_with_its_shards_of_weights_and_moments(
    trained: Any, tmp_path: Path, run_mmtrain: RunMmtrain
) -> None:
    recipe, stage, kinds = trained
    folder = exported_dcp(run_mmtrain, tmp_path)
    train = recipe.train.model_copy(update={"init_from": folder, "init_optimizer": True})
    weights = open_dcp(recipe.model_copy(update={"train": train}))
    assert weights.num_updates == NUM_UPDATES
    for spec in specs_of(stage).values():
        for kind, values in kinds.items():
            expected = values[spec.name]
            for tp_rank in range(2):
                shard = expected if spec.dim is None else expected.chunk(2, spec.dim)[tp_rank]
                flat = shard.reshape(-1)
                for first, last in ((0, flat.numel()), (flat.numel() // 3, flat.numel() // 2)):  # as ZeRO-1 cuts
                    part = torch.full((last - first,), 7.0)
                    name = f"{spec.name}#{kind}".rstrip("#")
                    assert weights.fill_saved(part, name, spec, tp_rank, 2, first)
                    assert torch.equal(part, flat[first:last]), (name, tp_rank)
    weights.close()


class _Nested(nn.Module):
    """A model with its tensors one prefix deeper, as wrappers leave them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


@pytest.mark.parametrize("form", ["model and optim", "bare", "wrapped"])
@pytest.mark.parametrize("name", ["qwen2", pytest.param("llama", marks=pytest.mark.slow)])
def test_what_torch_saved_of_a_model_of_transformers_starts_a_run(name: str, form: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    recipe = recipe_from(save_model(model, tmp_path / "model"))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    expected = unit_stage(recipe_from(save_model(model, tmp_path / "taught")))
    optimizer = torch.optim.AdamW(model.parameters(), fused=False)
    forms = {
        "model and optim": {"model": model.state_dict(), "optim": optimizer.state_dict()},
        "bare": model.state_dict() | {"train_state": torch.tensor(3), "lr_scheduler": {"last": 3}},
        "wrapped": _Nested(model).state_dict(),
    }
    writer = FileSystemWriter(tmp_path / "dcp", single_file_per_rank=form != "wrapped")
    dcp_save(forms[form], storage_writer=writer, no_dist=True)
    train = recipe.train.model_copy(update={"init_from": tmp_path / "dcp"})
    weights = open_dcp(recipe.model_copy(update={"train": train}))
    started = stage_from(recipe, weights)
    for (parameter, ours), theirs in zip(started.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs), parameter
    assert not weights.fresh_modules


def test_chunks_of_several_ranks_are_joined(tmp_path: Path) -> None:
    """Two ranks wrote rows of a matrix; the folder is that of one rank whose metadata names both parts."""
    whole = torch.arange(60.0).view(10, 6)
    dcp_save({"a": whole[:4].clone(), "b": whole[4:].clone()}, checkpoint_id=tmp_path, no_dist=True)
    reader = FileSystemReader(tmp_path)
    metadata = reader.read_metadata()
    first, _ = (metadata.state_dict_metadata.pop(name) for name in "ab")
    assert isinstance(first, TensorStorageMetadata)
    index = type(next(iter(metadata.storage_data)))
    moved = ChunkStorageMetadata(torch.Size([4, 0]), torch.Size([6, 6]))
    joined = TensorStorageMetadata(first.properties, torch.Size([10, 6]), [*first.chunks, moved])
    metadata.state_dict_metadata["w"] = joined
    files = [metadata.storage_data[index(name, [0, 0])] for name in "ab"]
    metadata.storage_data = {index("w", [0, 0]): files[0], index("w", [4, 0]): files[1]}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    folder = DcpFolder(tmp_path)
    assert torch.equal(folder.read("w", ((0, 10), (0, 6))), whole)
    assert torch.equal(folder.read("w", ((2, 7), (1, 5))), whole[2:7, 1:5])
    assert torch.equal(folder.read("w", ((5, 7), (0, 6))), whole[5:7])
    joined.chunks.pop()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ModelFolderError, match="the chunks of w do not hold all of it"):
        DcpFolder(tmp_path).read("w", ((2, 7), (1, 5)))


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("made-by-a-pickle",)


def test_a_pickle_of_others_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Evil()))
    with pytest.raises(ModelFolderError, match=r"posix\.mkdir, which is no part of metadata"):
        DcpFolder(tmp_path)
    assert not (tmp_path / "made-by-a-pickle").exists()
    (tmp_path / ".metadata").write_bytes(b"cut")
    with pytest.raises(ModelFolderError, match=r"\.metadata: no metadata of torch\.distributed\.checkpoint"):
        DcpFolder(tmp_path)


def test_what_does_not_fit_is_named_before_a_run_starts(tmp_path: Path) -> None:
    recipe = recipe_from(save_model(qwen2(), tmp_path / "model"))

    def check(**changes: Any) -> None:
        check_start_weights(recipe.model_copy(update={"train": recipe.train.model_copy(update=changes)}))

    dcp_save({"model": llama().state_dict()}, checkpoint_id=tmp_path / "other", no_dist=True)
    with pytest.raises(ModelFolderError, match=r"^train\.init_from: the weights in .*other are not those"):
        check(init_from=tmp_path / "other")
    dcp_save({"model": qwen2().state_dict()}, checkpoint_id=tmp_path / "bare", no_dist=True)
    check(init_from=tmp_path / "bare")
    with pytest.raises(UserError, match=r"^train\.init_optimizer: .*bare holds no state of an optimizer"):
        check(init_from=tmp_path / "bare", init_optimizer=True)
    with pytest.raises(
        UserError, match=r"^train\.init_optimizer: found true, but train\.init_from \(None\) is no fold"
    ):
        check(init_optimizer=True)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    dcp_save({"w": torch.ones(50)}, checkpoint_id=tmp_path, no_dist=True)
    [file] = tmp_path.glob("*.distcp")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelFolderError, match=rf"{file}: cannot read a tensor"):
        DcpFolder(tmp_path).read("w", ((0, 50),))
    file.unlink()
    with pytest.raises(ModelFolderError, match=rf"{file}: cannot read a tensor"):
        DcpFolder(tmp_path).read("w", ((0, 50),))


def test_an_optimizer_of_another_kind_is_refused(trained: Any, tmp_path: Path, run_mmtrain: RunMmtrain) -> None:
    recipe, stage, _ = trained
    folder = exported_dcp(run_mmtrain, tmp_path)
    train = recipe.train.model_copy(update={"init_from": folder, "init_optimizer": True})
    weights = open_dcp(recipe.model_copy(update={"train": train}))
    spec = next(iter(specs_of(stage).values()))
    with pytest.raises(UserError, match=r"holds no momentum, which .* it holds exp_avg, exp_avg_sq\."):
        weights.fill_saved(torch.empty(1), f"{spec.name}#momentum", spec, 0, 1, 0)


@pytest.mark.parametrize("option", ["--adapter", "--generator", "--dtype=bf16", "--push=a/b"])
def test_options_that_change_what_is_written_are_refused(option: str, tmp_path: Path, run_mmtrain: RunMmtrain) -> None:
    done = run_mmtrain("export", tmp_path / "run", "--out", tmp_path / "out", "--format", "dcp", option)
    assert done.returncode == 2
    assert f"leave {option.partition('=')[0]} out" in " ".join(done.stderr.split())


def test_a_run_with_adapters_is_refused(tmp_path: Path, run_mmtrain: RunMmtrain) -> None:
    recipe = recipe_from(save_model(qwen2(), tmp_path / "model"))
    adapted = recipe.model_copy(update={"train": recipe.train.model_copy(update={"lora": LoraSettings()})})
    run = run_folder(tmp_path / "run", adapted, {"llm": unit_stage(adapted)})
    done = run_mmtrain("export", run, "--out", tmp_path / "out", "--format", "dcp")
    assert done.returncode == 2
    assert "--format dcp: this run trains adapters (train.lora)" in done.stderr
    assert not (tmp_path / "out").exists()
    assert open_newest_good(run / CHECKPOINTS_FOLDER, print).step == 7
