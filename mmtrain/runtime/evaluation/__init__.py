"""Answers of a trained model to held-out questions.

Start with `evaluate.run`.
"""
