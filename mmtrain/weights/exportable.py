"""Check that a run can be exported, before it trains."""

from mmtrain.errors import UserError
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.train_settings import ExportedPart
from mmtrain.weights.export_adapter import check_adapter
from mmtrain.weights.export_weights import source_folder
from mmtrain.weights.new_folder import describe_new_folder


def check_exportable(recipe: Recipe, part: ExportedPart) -> None:
    """Raise UserError for a run of which this part cannot be written, whatever it learns.

    Raises:
        UserError: no family can hold the model, or the run has no such part.
        ModelFolderError: the folder that the run starts from cannot be read.
        DataError: the tokenizer of a model that starts from random weights cannot be read.
    """
    if part == "adapter":
        check_adapter(recipe)
    elif part == "generator":
        if recipe.model.generator is None:
            raise UserError("the run has no generator (model.generator)")
    elif source_folder(recipe) is None:
        describe_new_folder(recipe)
