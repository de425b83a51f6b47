"""Text as tokens: the chat format with its special tokens and labels, and a fast counter of tokens for indexing.

`chat_tokenizer` encodes a conversation with the item tokens of its media; `token_counter` counts what encoding would
return, without encoding.

Read `chat_tokenizer.ChatTokenizer.encode` first.
"""
