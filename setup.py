"""Build what pyproject.toml cannot state: the files beside code in a wheel, and the page that an index shows.

`recipes/`, the schema of recipes and the job files of SLURM and Ray lie where readers of the tree look for them. A
wheel holds copies of them in `mmtrain/shipped`, from where `mmtrain recipes` and `mmtrain launch` read them.

Links in README.md are relative. With MMTRAIN_REPOSITORY_URL, such as https://host/owner/mmtrain, the long description
has absolute ones, to the tag of this version, and the wheel names the address. Nothing else in the tree knows it.
"""

import os
import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
RECIPES = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("recipes/**/*.*"))]
SHIPPED = {  # where a file lies in the tree -> where in `mmtrain/shipped`
    **dict(zip(RECIPES, RECIPES, strict=True)),
    "docs/recipe.schema.json": "recipe.schema.json",
    "scripts/train.sbatch": "train.sbatch",
    "scripts/train_ray.py": "train_ray.py",
}
RELATIVE_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^]]*)\]\((?P<path>(?!https?:|#|mailto:)[^)\s]+)\)")


class BuildWithShippedFiles(build_py):
    """Copy `SHIPPED` into the built package; an editable install reads the tree itself."""

    def run(self) -> None:
        """Build the package, then copy."""
        super().run()
        if self.editable_mode:
            return
        for source, target in SHIPPED.items():
            copy = Path(self.build_lib, "mmtrain", "shipped", target)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / source, copy)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Return the files of the package, the copies too, so that an uninstall removes them."""
        copies = [str(Path(self.build_lib, "mmtrain", "shipped", target)) for target in SHIPPED.values()]
        return [*super().get_outputs(include_bytecode), *copies]


def version() -> str:
    """Return the version without importing the package, whose dependencies a build does not have."""
    text = (ROOT / "mmtrain/version.py").read_text(encoding="utf-8")
    statement = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert statement is not None
    return statement[1]


def long_description(address: str) -> str:
    """Return README.md; with an address, its links lead to the files of this version's tag there."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if not address:
        return text

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link["image"] else "blob"
        return f"{link['image']}[{link['text']}]({address}/{kind}/v{version()}/{link['path']})"

    return RELATIVE_LINK.sub(absolute, text)


def project_urls(address: str) -> dict[str, str]:
    """Return the addresses that an index shows; none while the repository has none."""
    if not address:
        return {}
    return {"Source": address, "Changelog": f"{address}/blob/v{version()}/CHANGELOG.md", "Issues": f"{address}/issues"}


if __name__ == "__main__":
    repository = os.environ.get("MMTRAIN_REPOSITORY_URL", "").rstrip("/")
    setup(
        cmdclass={"build_py": BuildWithShippedFiles},
        long_description=long_description(repository),
        long_description_content_type="text/markdown",
        project_urls=project_urls(repository),
    )
