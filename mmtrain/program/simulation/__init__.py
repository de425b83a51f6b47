"""The simulator: when every action of a program runs, given what actions cost.

Read `simulate.simulate` first. `timing` says what actions cost. `rank_equivalence` finds ranks that do the same, of
which `sim_graph_builder` keeps one in a `SimGraph`; `event_loop` runs that.
"""
