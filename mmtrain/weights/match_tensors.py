"""Compare the tensors of a folder with those that its family expects, and name all that differ at once."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import takewhile

from mmtrain.errors import ModelFolderError, first_lines
from mmtrain.families import Family, ModelFolder, ParameterSource
from mmtrain.families.weight_layouts import respell, sources_by_tensor
from mmtrain.weights.folder_tensors import DTYPES, StoredTensors

MAX_NAMES_IN_MESSAGE = 40  # a folder of another model lacks thousands
# What lies beside quantized weights: of fp8 in blocks or in one scale, of GPTQ and AWQ, of MXFP4.
_OF_QUANTIZED = ("_scale_inv", ".weight_scale", ".qweight", ".qzeros", "_blocks")


@dataclass(frozen=True)
class MatchedFolder:
    """A folder whose tensors are those that its family expects, by the names that they have in the folder."""

    sources: Mapping[str, ParameterSource]  # by our name of the parameter
    fresh: Mapping[str, ParameterSource]  # likewise, of those that the folder lacks, as it may
    carried: tuple[str, ...]  # tensors that this model does not compute
    of_other_models: tuple[str, ...]  # tensors of models that are not trained
    passed_over: tuple[str, ...]  # tensors that nothing here needs: buffers, and the copy of a tied matrix


def match_tensors(
    folder: ModelFolder, stored: StoredTensors, setting: str = "model.hf", unit: str | None = None
) -> MatchedFolder:
    """Return what every parameter is made of.

    setting: that named the folder. unit: the only one of the folder that is needed, without its projector; then tensors
        of other units are passed over.

    Raises ModelFolderError with all tensors that are missing, unknown, of another shape or of a type that is not read.
    """
    family = folder.family
    of_family = sources_in(folder, stored)
    expected = of_family
    if unit is not None:
        expected = [source for source in of_family if _belongs_to(source.name, unit, folder)]
    spelling = max(family.spellings, key=lambda candidate: _num_known(respell(expected, candidate), stored))
    sources = respell(expected, spelling)
    optional = [source for source in sources if source.may_be_missing]
    fresh = [] if any(tensor in stored.tensors for tensor in _tensor_shapes(optional)) else optional
    sources = [source for source in sources if source not in fresh]
    carried = _tensor_shapes(respell(folder.settings.carried if unit is None else (), spelling))
    shapes = _tensor_shapes(sources) | carried
    ignored = family.ignored(folder.settings)
    of_others_prefixes = family.other_models + family.other_blocks(folder.settings)
    of_others = sorted(name for name in stored.tensors if name.startswith(of_others_prefixes))
    expected_names = shapes.keys() | set(of_others)
    of_folder = respell([*of_family, *folder.settings.carried], spelling)
    known = expected_names | _tensor_shapes(of_folder).keys()
    scope = "" if unit is None else _common_module(shapes)  # strange tensors elsewhere do not concern a unit
    unknown = sorted(
        name for name in stored.tensors.keys() - known if name.startswith(scope) and not name.endswith(ignored)
    )
    problems = [*_missing(shapes, stored, unknown), *_unknown(unknown, shapes), *_misshaped(shapes, stored)]
    if problems:
        raise ModelFolderError(
            f"{setting}: the weights in {folder.path} are not those of its config.json ({family.name}), "
            f"{len(problems)} differ{_remedy(stored)}:" + first_lines(problems, MAX_NAMES_IN_MESSAGE)
        )
    passed_over = stored.tensors.keys() - expected_names
    by_name = {source.name: source for source in sources}
    fresh_by_name = {source.name: source for source in fresh}
    if unit is not None:
        of_others = []
    return MatchedFolder(by_name, fresh_by_name, tuple(carried), tuple(of_others), tuple(sorted(passed_over)))


def sources_in(folder: ModelFolder, stored: StoredTensors) -> list[ParameterSource]:
    """Return what the family's parameters are made of, in the layout of which most tensors are in the folder."""
    layouts = [layout for layout in (folder.family.weights, folder.family.other_layout) if layout is not None]
    candidates = [list(layout(folder.settings)) for layout in layouts]
    if len(candidates) == 1:
        return candidates[0]
    return max(candidates, key=lambda sources: _stored_share(folder.family, sources, stored))


def _stored_share(family: Family, sources: Sequence[ParameterSource], stored: StoredTensors) -> float:
    """Return the share of a layout's tensors that the folder has, in the shape of the layout."""
    stored_shapes = {name: weight.shape for name, weight in stored.tensors.items()}
    shares = []
    for spelling in family.spellings:
        shapes = _tensor_shapes(respell(sources, spelling))
        shares.append(sum(stored_shapes.get(name) == shape for name, shape in shapes.items()) / len(shapes))
    return max(shares)


def _belongs_to(name: str, unit: str, folder: ModelFolder) -> bool:
    """Return whether a parameter is one of the unit, and not of its projector."""
    projector = f"{unit}.layers.{folder.settings.model[unit]['layers'] + 1}."
    is_of_projector = unit != "llm" and name.startswith(projector) and not name.startswith(f"{projector}post_norm.")
    return name.startswith(f"{unit}.") and not is_of_projector


def _common_module(names: Iterable[str]) -> str:
    """Return the prefix of the innermost module that holds all tensors, empty if that is the model."""
    columns = zip(*(name.split(".") for name in names), strict=False)
    shared = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, columns)]
    return "".join(f"{part}." for part in shared)


def _tensor_shapes(sources: Iterable[ParameterSource]) -> dict[str, tuple[int, ...]]:
    return {tensor: shape for tensor, (shape, _) in sources_by_tensor(sources).items()}


def _num_known(sources: Iterable[ParameterSource], stored: StoredTensors) -> int:
    return sum(block.tensor in stored.tensors for source in sources for block in source.blocks)


def _remedy(stored: StoredTensors) -> str:
    """Say what to do about quantized weights, which a config need not mention."""
    if not any(
        name.endswith(_OF_QUANTIZED) or weight.dtype.startswith("F8") for name, weight in stored.tensors.items()
    ):
        return ""
    return "; they are quantized, and cannot be trained: use the folder of the bf16 or fp16 model"


def _missing(shapes: Mapping[str, tuple[int, ...]], stored: StoredTensors, unknown: Sequence[str]) -> list[str]:
    return [
        f"{name}: missing, {list(shape)} expected{_nearest(name, unknown)}"
        for name, shape in shapes.items()
        if name not in stored.tensors
    ]


def _unknown(unknown: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    return [f"{name}: not a tensor of this model{_nearest(name, list(shapes))}" for name in unknown]


def _nearest(name: str, known: Sequence[str]) -> str:
    closest = get_close_matches(name, known, n=1, cutoff=0.8)
    return f" (the nearest name is {closest[0]})" if closest else ""


def _misshaped(shapes: Mapping[str, tuple[int, ...]], stored: StoredTensors) -> list[str]:
    problems = []
    for name, shape in shapes.items():
        weight = stored.tensors.get(name)
        if weight is not None and weight.shape != shape:
            problems.append(f"{name}: has the shape {list(weight.shape)}, {list(shape)} expected")
        if weight is not None and weight.dtype not in DTYPES:
            problems.append(f"{name}: is stored as {weight.dtype}; allowed: {', '.join(DTYPES)}")
    return problems
