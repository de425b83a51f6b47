"""Text as tokens: conversations with their labels, and fast counters of tokens for indexing.

`chat_tokenizer` encodes mmtrain's own chat format, `template_tokenizer` the chat template of a model folder; both are a
`SampleTokenizer`. `token_counter` counts what encoding a text would return, without encoding.

Read `sample_tokenizer.SampleTokenizer` first, then `template_tokenizer.TemplateTokenizer.encode`.
"""
