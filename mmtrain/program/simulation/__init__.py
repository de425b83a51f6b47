"""The simulator: when every action of a program runs, given what actions cost.

Start with `simulate.simulate`.
"""
