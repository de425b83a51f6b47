"""Leave out of the answers in a rendering those that are not to be learned."""

from collections.abc import Sequence

from mmtrain.data.text.answer_spans import AnswerFinder
from mmtrain.data.text.chat_messages import Conversation
from mmtrain.data.text.chat_template import Rendering, Span
from mmtrain.data.text.sample_tokenizer import BadConversationError


def learned_spans(
    finder: AnswerFinder, conversation: Conversation, rendering: Rendering, spans: Sequence[Span]
) -> Sequence[Span]:
    """Return those of the spans of all answers that are to be learned.

    A template that says itself where answers are (`{% generation %}`) may write several spans for one; then the answers
    are looked for in its text. Raises `BadConversationError` if it does not show where they are.
    """
    answers = [number for number, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    if all(conversation.is_learned[number] for number in answers):
        return spans
    if len(spans) == len(answers):
        return [span for number, span in zip(answers, spans, strict=True) if conversation.is_learned[number]]
    unlearned = [number for number in answers if not conversation.is_learned[number]]
    found = [finder.find_text(conversation, number, rendering.text) for number in unlearned]
    left_out = [span for span in found if span is not None]
    if len(left_out) < len(unlearned):
        raise BadConversationError("the chat template does not show where an answer is that is not to be learned")
    return [span for span in spans if not any(span[0] < end and start < span[1] for start, end in left_out)]
