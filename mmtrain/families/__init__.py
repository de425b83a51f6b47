"""Families of published models: the settings and the names of weights of a Hugging Face folder, as data.

A family is one file, or an entry of `text_decoders`: `settings` turns its `config.json` into settings of a recipe,
`weights` says for each of our parameters which tensors of the folder it is made of. No torch, no `transformers`. Read
`family` first, then `text_decoders`.
"""

from mmtrain.families.family import Family, FolderSettings
from mmtrain.families.folder_files import CONFIG_FILE
from mmtrain.families.model_folder import ModelFolder, read_model_folder
from mmtrain.families.registry import FAMILIES
from mmtrain.families.weight_layouts import Block, ParameterSource

__all__ = [
    "CONFIG_FILE",
    "FAMILIES",
    "Block",
    "Family",
    "FolderSettings",
    "ModelFolder",
    "ParameterSource",
    "read_model_folder",
]
