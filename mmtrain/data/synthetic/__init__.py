"""Training data made from nothing or from recordings, for demos and tests.

Start with `demo.generate`.
"""
