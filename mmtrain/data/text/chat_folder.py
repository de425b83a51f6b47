"""Write mmtrain's own chat format as the tokenizer side of a Hugging Face folder: with a chat template."""

import json
from pathlib import Path

from mmtrain.data.text.chat_tokenizer import END_TOKEN, PAD_TOKEN, load_chat_vocabulary
from mmtrain.families.folder_files import GENERATION_FILE, TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from mmtrain.recipe.settings.modalities import MODALITIES

_TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|' + message.role + '|>' -}}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- else -%}
        {%- for part in message.content -%}
            {%- if part.type == 'text' -%}
                {{- part.text -}}
            {%- elif part.type == 'audio' -%}
                {{- '<|audio|>' -}}
            {%- else -%}
                {{- '<|image|>' -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""


def write_chat_folder(folder: Path, tokenizer_file: Path) -> None:
    """Write the files by which a folder's tokenizer and template encode as `ChatTokenizer` does with a file.

    They differ in one thing: in a folder a line break right after the mark of an image belongs to the mark. Raises
    `DataError` for a file that is no such tokenizer.
    """
    tokenizer = load_chat_vocabulary(tokenizer_file)
    tokenizer.encode_special_tokens = False  # the template writes them as text
    tokenizer.save(str(folder / TOKENIZER_FILE))
    media = {
        f"{modality.media[0]}_token": modality.placeholder
        for modality in MODALITIES.values()
        if tokenizer.token_to_id(modality.placeholder) is not None
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "pad_token": PAD_TOKEN,
        "eos_token": END_TOKEN,
        "extra_special_tokens": media,
    }
    generation = {"eos_token_id": tokenizer.token_to_id(END_TOKEN), "pad_token_id": tokenizer.token_to_id(PAD_TOKEN)}
    for name, content in ((TOKENIZER_CONFIG_FILE, settings), (GENERATION_FILE, generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / TEMPLATE_FILE).write_text(_TEMPLATE, encoding="utf-8")
