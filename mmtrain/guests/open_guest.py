"""Open the folder of a guest with `transformers`: its config, the names of its parameters, and its modules."""

import importlib.metadata
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch import nn

from mmtrain.errors import ModelFolderError, UserError
from mmtrain.extras import GUESTS, require_extra
from mmtrain.families.folder_files import CONFIG_FILE
from mmtrain.guests.packed_attention import PACKED_ATTENTION, register_packed_attention

OLDEST_TRANSFORMERS = "5.17"  # the first that the tests of guests were run with
# Layers in which a token sees earlier tokens of its sample, all or those of a window: what our attention computes.
_PACKED_LAYERS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class GuestNames:
    """The parameters of a guest, without their values."""

    parameters: Mapping[str, tuple[int, ...]]  # name -> shape; tied ones once
    copies: Mapping[str, str]  # names of tied ones -> the name under which they are in `parameters`
    base: str  # name of the part that makes hidden states; older folders leave it out of names
    model: str  # its class
    version: str  # of `transformers`


@dataclass(frozen=True)
class GuestModules:
    """The modules of a guest, with weights that are not set yet."""

    model: nn.Module
    blocks: tuple[str, ...]  # names of its blocks, in order; what a rank gathers at once
    base: str  # name of the part that makes hidden states of ids; the rest makes logits of these
    attention: str  # the implementation of attention


def guest_names(folder: Path) -> GuestNames:
    """Return the parameters of the model in a folder; builds it without memory for its weights.

    Raises UserError without `transformers`, or with too old a version; ModelFolderError for a model that it cannot
    build, or that is no guest: one without a language head, or with numbers beside its parameters.
    """
    _require_transformers()
    return _names_by_config(folder, (folder / CONFIG_FILE).read_bytes())


@lru_cache(maxsize=8)
def _names_by_config(folder: Path, _: bytes) -> GuestNames:
    """Return the parameters; the content of the config is a part of the key, for it may change."""
    config, model_class = _model_class(folder)
    with _quiet(), torch.device("meta"), _failures_named(folder, config):
        model = model_class._from_config(config)
    parameters = dict(model.named_parameters())
    names = {param: name for name, param in parameters.items()}
    with_copies = dict(model.named_parameters(remove_duplicate=False))
    copies = {name: names[param] for name, param in with_copies.items() if name not in parameters}
    buffers = sorted(model.state_dict().keys() - with_copies.keys())
    if buffers:
        raise ModelFolderError(
            f"model.hf: {folder}: {model_class.__name__} keeps numbers beside its parameters ({len(buffers)}, such as "
            f"{buffers[0]}), which no guest may have yet; use a model without"
        )
    scalars = sorted(name for name, param in parameters.items() if not param.ndim)
    if scalars:
        raise ModelFolderError(
            f"model.hf: {folder}: {model_class.__name__} has a parameter without dimensions, {scalars[0]}, which "
            "cannot be sharded; use another model"
        )
    _blocks_of(model, config, folder)
    if not hasattr(model, model.base_model_prefix):
        raise ModelFolderError(
            f"model.hf: {folder}: {model_class.__name__} has no part that makes hidden states apart from its head; use "
            "another model"
        )
    shapes = {name: tuple(param.shape) for name, param in parameters.items()}
    version = importlib.metadata.version("transformers")
    return GuestNames(shapes, copies, model.base_model_prefix, model_class.__name__, version)


def build_guest(folder: Path, dtype: torch.dtype) -> GuestModules:
    """Build the modules of the model in a folder; weights are memory of the host that nothing has touched.

    Raises as `guest_names`.
    """
    from transformers.initialization import no_init_weights

    config, model_class = _model_class(folder)
    register_packed_attention()
    attention = (
        PACKED_ATTENTION if _can_pack(config, model_class) else "sdpa" if model_class._supports_sdpa else "eager"
    )
    with _quiet(), no_init_weights(), _failures_named(folder, config):
        model = model_class._from_config(config, dtype=dtype, attn_implementation=attention)
    model.tie_weights()  # which `init_weights` does otherwise
    assert dict(model.named_parameters()).keys() == guest_names(folder).parameters.keys()
    model.eval()  # nothing in a stage is random: no dropout, and no noise of routers
    model.requires_grad_(True)
    return GuestModules(model, _blocks_of(model, config, folder), model.base_model_prefix, attention)


def _can_pack(config: Any, model_class: Any) -> bool:
    """Return whether all layers attend as our attention does, as far as the config tells."""
    layers = getattr(config, "layer_types", None) or ()
    return bool(model_class._supports_attention_backend) and all(kind in _PACKED_LAYERS for kind in layers)


def _blocks_of(model: nn.Module, config: Any, folder: Path) -> tuple[str, ...]:
    """Return the names of the blocks: the list of modules that is as long as the config says."""
    count = config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return tuple(f"{name}.{index}" for index in range(count))
    raise ModelFolderError(
        f"model.hf: {folder}: {type(model).__name__} has no list of {count} blocks, as its config says; use another "
        "model"
    )


def _model_class(folder: Path) -> tuple[Any, Any]:
    """Return the config of a folder, and the class of its model with a language head. Raises as `guest_names`."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    version = importlib.metadata.version("transformers")
    try:
        with _quiet():
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise ModelFolderError(
            f"model.hf: transformers {version} cannot read the config in {folder} ({_first_line(error)}); use a model "
            "that it knows, or a newer version"
        ) from None
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    stated = (getattr(config, "architectures", None) or [None])[0]
    if model_class is None or stated not in (None, model_class.__name__):
        allowed = "no class of its kind has one" if model_class is None else f"allowed: {model_class.__name__}"
        raise ModelFolderError(
            f"model.hf: {folder}: {stated or config.model_type} has no language head that transformers {version} knows "
            f"as one of text ({allowed}); use a model for causal language modeling"
        )
    return config, model_class


def _require_transformers() -> None:
    """Raise UserError where `transformers` is not installed, or too old."""
    require_extra(GUESTS, "model.guest: a guest")
    found = importlib.metadata.version("transformers")
    if Version(found) < Version(OLDEST_TRANSFORMERS):
        raise UserError(
            f"model.guest: a guest needs transformers {OLDEST_TRANSFORMERS} or newer, and {found} is installed: "
            f"{GUESTS.install}"
        )


@contextmanager
def _failures_named(folder: Path, config: Any) -> Iterator[None]:
    """Name the folder where the code of a model fails to build it: a package that is missing, sizes that do not fit."""
    try:
        yield
    except Exception as error:  # whatever the code of any model raises
        raise ModelFolderError(
            f"model.hf: {folder}: transformers cannot build {config.model_type} ({_first_line(error)})"
        ) from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep advice of `transformers` on its own trainer off the terminal."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
