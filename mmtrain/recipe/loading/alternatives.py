"""Settings of which a recipe has one or the other: what is set later, or by who extends it, replaces the other."""

from dataclasses import replace

from mmtrain.recipe.raw_tree import KeyPath, Node, merge_trees, node_at

# A section, and two settings in it that say the same in different units.
_ALTERNATIVES = (
    (("train",), ("steps", "epochs")),
    (("train", "optimizer"), ("warmup_steps", "warmup_ratio")),
)


def merge_layers(base: Node, over: Node) -> Node:
    """Merge `over` into `base`; where it sets one of two alternatives, that replaces the other one of `base`."""
    for section, pair in _ALTERNATIVES:
        for chosen, other in (pair, pair[::-1]):
            if _is_set(over, (*section, chosen)) and node_at(over, (*section, other)) is None:
                base = _without(base, (*section, other))
    return merge_trees(base, over)


def without_replaced(tree: Node, keys: KeyPath) -> Node:
    """Return a recipe in which the setting at `keys` was set last, without the alternative that it replaces."""
    for section, pair in _ALTERNATIVES:
        for chosen, other in (pair, pair[::-1]):
            if keys == (*section, chosen) and _is_set(tree, (*section, chosen)):
                tree = _without(tree, (*section, other))
    return tree


def _is_set(tree: Node, keys: tuple[str, ...]) -> bool:
    node = node_at(tree, keys)
    return node is not None and node.value is not None


def _without(tree: Node, keys: tuple[str, ...]) -> Node:
    """Return a tree without the value at `keys`, which may be missing."""
    if not isinstance(tree.value, dict) or keys[0] not in tree.value:
        return tree
    if len(keys) == 1:
        return replace(tree, value={key: child for key, child in tree.value.items() if key != keys[0]})
    return replace(tree, value={**tree.value, keys[0]: _without(tree.value[keys[0]], keys[1:])})
