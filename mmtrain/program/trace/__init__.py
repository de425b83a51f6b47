"""Timelines, simulated or measured, and what is read from them: bubbles and the critical path.

Start with `timeline.Timeline`.
"""
