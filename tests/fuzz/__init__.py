"""Hostile input: whatever it holds, the answer is a result or an error with a message."""
