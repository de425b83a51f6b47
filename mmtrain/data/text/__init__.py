"""Text of conversations as tokens: the chat format, its ids and labels, and fast token counts.

Start with `chat_tokenizer.ChatTokenizer.encode`.
"""
