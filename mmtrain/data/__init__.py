"""From data files to the arrays that each rank computes on; without torch.

`media` reads images, video and audio. `formats` reads files into samples, `text` makes tokens of them, and `index`
measures all samples once. `stream` decides which samples train together, `loading` builds the steps of a rank, and
`service` does so on other machines. `synthetic` generates demo data. Each sub-package imports only those named before
it.

Read `loader.Loader` first: it yields the steps that training consumes.
"""

from mmtrain.data.formats.sample import Quarantined, Sample, Turn, read_quarantine, write_quarantine
from mmtrain.data.index.data_index import DataIndex, build_index
from mmtrain.data.loader import Loader
from mmtrain.data.loading.batch_builder import BadSampleTracker, BatchBuilder, StepData, StepRequest
from mmtrain.data.loading.payload import EncoderPayload, PayloadNeed, TextPayload
from mmtrain.data.stream.group_stream import GroupStream, validation_batches
from mmtrain.data.text.chat_tokenizer import ChatTokenizer
from mmtrain.data.text.load_tokenizer import load_recipe_tokenizer, load_tokenizer
from mmtrain.data.text.sample_tokenizer import EncodedSample, SampleTokenizer

__all__ = [
    "BadSampleTracker",
    "BatchBuilder",
    "ChatTokenizer",
    "DataIndex",
    "EncodedSample",
    "EncoderPayload",
    "GroupStream",
    "Loader",
    "PayloadNeed",
    "Quarantined",
    "Sample",
    "SampleTokenizer",
    "StepData",
    "StepRequest",
    "TextPayload",
    "Turn",
    "build_index",
    "load_recipe_tokenizer",
    "load_tokenizer",
    "read_quarantine",
    "validation_batches",
    "write_quarantine",
]
