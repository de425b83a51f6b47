"""The names of the files of a Hugging Face folder."""

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"  # of weights in several files
DIFFUSERS_SINGLE_FILE = "diffusion_pytorch_model.safetensors"
DIFFUSERS_INDEX_FILE = "diffusion_pytorch_model.safetensors.index.json"
WEIGHT_FILES = ((INDEX_FILE, SINGLE_FILE), (DIFFUSERS_INDEX_FILE, DIFFUSERS_SINGLE_FILE))
PIPELINE_FILE = "model_index.json"  # of a pipeline of `diffusers`, whose models are in folders inside
GENERATION_FILE = "generation_config.json"
# The second one holds the processors of all media of a model, that of images under a key of its own.
IMAGE_PROCESSOR_FILE = "preprocessor_config.json"
PROCESSOR_FILE = "processor_config.json"
VIDEO_PROCESSOR_FILE = "video_preprocessor_config.json"

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_JSON_FILE = "chat_template.json"  # of processors, before `chat_template.jinja`
TEMPLATE_FOLDER = "additional_chat_templates"  # of further templates, each as NAME.jinja
# Files that decide the ids of a conversation.
CONVERSATION_FILES = (
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    TEMPLATE_FILE,
    TEMPLATE_JSON_FILE,
    SPECIAL_TOKENS_FILE,
    ADDED_TOKENS_FILE,
)
# Vocabularies in other formats, from which `transformers` makes a `tokenizer.json`.
SLOW_TOKENIZER_FILES = (
    "tokenizer.model",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.txt",
    "merges.txt",
)
