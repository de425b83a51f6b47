"""Weights of Hugging Face folders: read into the shards of a run, and written from a run's checkpoint.

Only safetensors, read by range: a rank reads just its tensor-parallel slices of its own stages. Which tensors a
parameter is made of is data of its family (`mmtrain.families`). Read `import_weights` first, then `export_weights`.
"""

from mmtrain.families.stored_tensors import StoredWeight
from mmtrain.weights.adapted_weights import AdaptedWeights, open_adapted
from mmtrain.weights.dcp_folder import is_dcp_folder
from mmtrain.weights.dcp_weights import DcpWeights, open_dcp
from mmtrain.weights.export_adapter import export_adapter
from mmtrain.weights.export_dcp import export_dcp
from mmtrain.weights.export_weights import export_folder, export_generator
from mmtrain.weights.exportable import check_exportable
from mmtrain.weights.folder_tensors import FolderTensors
from mmtrain.weights.guest_weights import describe_guest
from mmtrain.weights.import_weights import PretrainedWeights, open_pretrained, start_folders
from mmtrain.weights.peft_adapter import is_adapter_folder
from mmtrain.weights.run_weights import RunWeights
from mmtrain.weights.write_tensors import ExportDtype, ExportedFolder

__all__ = [
    "AdaptedWeights",
    "DcpWeights",
    "ExportDtype",
    "ExportedFolder",
    "FolderTensors",
    "PretrainedWeights",
    "RunWeights",
    "StoredWeight",
    "check_exportable",
    "describe_guest",
    "export_adapter",
    "export_dcp",
    "export_folder",
    "export_generator",
    "is_adapter_folder",
    "is_dcp_folder",
    "open_adapted",
    "open_dcp",
    "open_pretrained",
    "start_folders",
]
