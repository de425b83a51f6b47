"""The order of training: groups of samples, epoch after epoch, as a pure function of the seed and the lengths.

`group_stream` finds the groups of any step without computing those before it; the algorithms that group and balance are
those of the package `mmtrain.balance`. `recipe_summaries` serves `mmtrain data group` and `data stats`.

Read `group_stream.GroupStream.batch` first.
"""
