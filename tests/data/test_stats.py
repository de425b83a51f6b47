from collections.abc import Callable
from pathlib import Path

from mmtrain.balance import Grouping
from mmtrain.data import GroupStream, build_index
from mmtrain.data.index.stats import compute_stats, compute_stats_for_recipe
from mmtrain.data.stream.recipe_summaries import compare_grouping_methods
from mmtrain.recipe.settings.data_settings import SourceSettings
from mmtrain.recipe.settings.schema import Recipe
from tests.data.rows import row

Picture = Callable[..., Path]
MakeRecipe = Callable[..., Recipe]


def test_stats_with_and_without_a_recipe(tmp_path: Path, picture: Picture, recipe: MakeRecipe) -> None:
    picture("a.png", 16, 24)
    picture("b.png", 8, 8)
    rows = [row("<image>x<image>", "red", "a.png", "b.png"), row("1 + 2", "3"), row("<image>", "a", "gone.png")]
    made = recipe([*rows, {"id": "broken"}], max_bad_rate=0)
    sources = [SourceSettings(path=tmp_path / "train.json")]

    plain = compute_stats(sources)
    assert plain.names == ("characters of text", "images", "pixels of images", "videos", "seconds of sound")
    assert plain.values.tolist() == [[18, 2, 16 * 24 + 64, 0, 0], [6, 0, 0, 0, 0]]
    assert plain.quarantined == {"missing_image": 1, "malformed": 1}

    seen, _ = compute_stats_for_recipe(made, sources)
    assert seen.names == ("LLM tokens", "vision tokens")
    assert seen.values[:, 1].tolist() == [7, 0]
    assert seen.quarantined == plain.quarantined


def test_methods_are_compared_as_training_would_group(recipe: MakeRecipe) -> None:
    made = recipe([row(f"{s} + {s % 7}", "3" * (1 + s % 9)) for s in range(60)])
    index = build_index(made)
    grouping = Grouping.of(made.data, 4)
    clock = iter(range(100))
    scores = compare_grouping_methods(index, grouping, 3, 4, lambda: float(next(clock)))
    assert [s.method for s in scores] == ["matched", "isf", "random", "length", "device"]
    assert all(s.seconds == 1 for s in scores)
    assert scores[0].groups == GroupStream(index.lengths, grouping, 3, index.weights).groups_per_epoch
    assert scores[0].dist_ratio["vision"] == 0
    assert scores[0].dist_ratio["llm"] <= min(s.dist_ratio["llm"] for s in scores[1:])
