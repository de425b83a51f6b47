"""Score what a model drew of the captions of `mmtrain data demo --drawing`: pixels alone decide.

    mmtrain evaluate runs/draw-shapes --draw 192 --steps 25 --guidance 2
    python scripts/score_shapes.py runs/draw-shapes/samples

A picture shows what the nearest of all drawn prototypes shows. The same is counted for the targets, and for what the
model drew with blanked captions. The exit status is 1 if fewer colours or shapes are right than the goals say.
"""

import argparse
import json
import sys
from pathlib import Path

from PIL import Image

from mmtrain.data.synthetic.drawing_demo import DrawnShape, find_drawing, recognize

GOALS = {"colour": 0.90, "shape": 0.70}
ATTRIBUTES = ("colour", "shape", "size", "place")


def load(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")


def score(folder: Path, files: list[str], wanted: list[DrawnShape]) -> dict[str, float]:
    """Return the share of pictures that show what their captions say, by attribute."""
    shown = recognize(load(folder / name) for name in files)
    pairs = list(zip(shown, wanted, strict=True))
    return {name: sum(getattr(a, name) == getattr(b, name) for a, b in pairs) / len(pairs) for name in ATTRIBUTES}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("samples", type=Path, help="folder that mmtrain evaluate wrote")
    folder = parser.parse_args().samples
    rows = json.loads((folder / "samples.json").read_text(encoding="utf-8"))
    files = [row["file"] for row in rows]
    wanted = [find_drawing(row["caption"]) for row in rows]
    captions = len({drawing.caption for drawing in wanted})
    print(f"{len(rows)} pictures of {captions} captions; shares that are right:")
    print(f"{'':16}" + "".join(f"{name:>9}" for name in ATTRIBUTES))
    scores = {kind: score(folder / kind, files, wanted) for kind in ("target", "drawn", "blanked")}
    for kind, shares in scores.items():
        print(f"{kind:16}" + "".join(f"{shares[name]:9.1%}" for name in ATTRIBUTES))
    missed = [f"{name} {scores['drawn'][name]:.1%} of {goal:.0%}" for name, goal in GOALS.items()
              if scores["drawn"][name] < goal]  # fmt: skip
    print("goals missed: " + "; ".join(missed) if missed else "goals reached")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
