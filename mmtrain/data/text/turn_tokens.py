"""Find the tokens that divide the turns of a conversation: those with which a text could forge a turn."""

import re
from collections.abc import Collection, Sequence

from mmtrain.data.text.chat_template import Message, RenderError
from mmtrain.data.text.rendering_skeletons import Render
from mmtrain.data.text.template_facts import TemplateFacts
from mmtrain.data.text.tokenizer_folder import TokenizerFolder

_QUESTIONS = ("first question", "second question")
_ANSWERS = ("first answer", "second answer")
_SYSTEM = "system text"
_ROLES = ("user", "assistant")
_SEQUENCE_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")


def find_turn_tokens(
    render: Render, facts: TemplateFacts, folder: TokenizerFolder, special: Collection[str], added: re.Pattern[str]
) -> list[str]:
    """Return the added tokens that a template writes around turns, those that end an answer, and those of a sequence.

    What only opens or closes a thought divides no turns, though a template may write it in front of an answer.

    special: the added tokens that are marked as special. added: matches all added tokens.
    """
    tokens = [facts.terminator, *added.findall(facts.answer_header)[:1]]
    for turns in (_turns(facts, ()), _turns(facts, (("system", _SYSTEM),))):
        try:
            text = render(turns, False, ()).text
        except RenderError:  # such as of a system turn
            continue
        text = text.partition(_QUESTIONS[1])[0]
        tokens += [token for token in added.findall(text) if token in special]
        tokens += added.findall(text.partition(_ANSWERS[0])[2])  # the end of an answer, and the start of a question
    tokens += [folder.special_tokens.get(name, "") for name in _SEQUENCE_TOKENS]
    tokens += [folder.tokenizer.id_to_token(token_id) or "" for token_id in folder.end_ids]
    # Gemma's vocabulary has line breaks and spaces among its added tokens: they cannot forge anything.
    return [token for token in dict.fromkeys(tokens) if added.fullmatch(token) and not token.isspace()]


def _turns(facts: TemplateFacts, first: Sequence[tuple[str, str]]) -> list[Message]:
    questions_and_answers = zip(_QUESTIONS, _ANSWERS, strict=True)
    turns = [*first, *((role, text) for pair in questions_and_answers for role, text in zip(_ROLES, pair, strict=True))]
    return [
        {"role": role, "content": [{"type": "text", "text": text}] if facts.texts_as_parts else text}
        for role, text in turns
    ]
