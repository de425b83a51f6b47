"""Let a trained model answer held-out questions, and score the answers.

Start with `evaluate.run`.
"""
