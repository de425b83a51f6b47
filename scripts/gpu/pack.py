"""Carry packages to a machine without a network, in parts that fit what it takes at once.

`pack` runs where there is a network. Each `part-N` folder holds mmtrain's own requirements, so that it can be used
alone, and a piece of the archive of FlashAttention-4, whose compiler alone is 63 MiB. `unpack` runs on the machine,
keeps the pieces of earlier calls, and installs what is complete. The standard library is all that either needs.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from scripts.gpu.limited import KERNELS_FOLDER

MIB = 2**20
PYTHON_VERSION = "3.12"  # of current images with torch
# What images with torch lack. typing-extensions: pydantic needs a newer one than may be there.
MMTRAIN_PACKAGES = (
    "megatron-core==0.19.2",
    "pydantic==2.14.4",
    "pydantic-core==2.50.5",
    "annotated-types==0.8.0",
    "typing-inspection==0.4.5",
    "typing-extensions==4.16.0",
    "liger-kernel==0.8.5",
)
ATTENTION_PACKAGES = (
    "flash-attn-4==4.0.0b36",
    "quack-kernels==0.6.5",
    "nvidia-cutlass-dsl==4.8.1",
    "nvidia-cutlass-dsl-libs-base==4.8.1",
    "nvidia-cutlass-dsl-libs-core==4.8.1",
    "nvidia-cutlass-dsl-libs-cu13==4.8.1",
    "apache-tvm-ffi==0.1.15.post2",
    "torch-c-dlpack-ext==0.1.5",
)
PLATFORMS = (*(f"manylinux_2_{n}_x86_64" for n in (17, 24, 27, 28, 31, 34, 35)), "manylinux2014_x86_64")
SITE = "site"  # the folder of packages, inside the archives and where they are unpacked
ARCHIVE, PIECES, CHECKSUMS = "mmtrain.tar.xz", "attention.tar.xz", "checksums.json"


def pack(folder: Path, part_mib: float) -> list[Path]:
    """Download the packages, and write folders `part-1`, `part-2`, ... of at most `part_mib` each; return them.

    Kernels that `compile_attention.py` wrote to `folder/compiled-kernels` travel too. Raises ValueError if the parts
    are too small, and CalledProcessError if pip fails.
    """
    with tempfile.TemporaryDirectory() as scratch:
        archives = {}
        for name, packages in {ARCHIVE: MMTRAIN_PACKAGES, PIECES: ATTENTION_PACKAGES}.items():
            site = Path(scratch) / f"{name}.site"
            download(packages, site)
            archives[name] = Path(scratch) / name
            with tarfile.open(archives[name], "w:xz") as archive:
                archive.add(site, SITE)
                if name == PIECES and (folder / KERNELS_FOLDER).exists():
                    archive.add(folder / KERNELS_FOLDER, KERNELS_FOLDER)
        return split(archives[ARCHIVE], archives[PIECES], folder, int(part_mib * MIB))


def download(packages: tuple[str, ...], site: Path) -> None:
    """Install wheels for the other machine's Python into a folder, without what they need in turn."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", "--no-compile"]
    command += ["--python-version", PYTHON_VERSION, "--implementation", "cp", "--target", str(site)]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*command, *packages], check=True)


def split(whole: Path, pieces: Path, folder: Path, part_bytes: int) -> list[Path]:
    """Write the parts: `whole` in each of them, and a piece of `pieces`."""
    checksums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (whole, pieces)}
    piece_bytes = part_bytes - whole.stat().st_size - MIB // 16  # for the checksums and the folders
    if piece_bytes <= 0:
        raise ValueError(f"a part must hold more than {whole.name}, which has {whole.stat().st_size / MIB:.1f} MiB")
    content = pieces.read_bytes()
    starts = range(0, len(content), piece_bytes)
    for old in folder.glob("part-*"):
        shutil.rmtree(old)
    parts = [folder / f"part-{number}" for number in range(1, len(starts) + 1)]
    for number, (part, start) in enumerate(zip(parts, starts, strict=True), 1):
        part.mkdir(parents=True)
        shutil.copy(whole, part)
        (part / f"{PIECES}.{number}").write_bytes(content[start : start + piece_bytes])
        (part / CHECKSUMS).write_text(json.dumps({"num_parts": len(starts), "sha256": checksums}), encoding="utf-8")
    return parts


def unpack(folder: Path, work: Path) -> list[str]:
    """Install into `work` what is complete of the parts in `folder` and those of earlier calls; say what was done.

    Raises ValueError if there is no part, or if mmtrain's own requirements are damaged. Without FlashAttention-4
    everything runs on other kernels.
    """
    parts = sorted(folder.glob("part-*"))
    if not parts:
        raise ValueError(f"{folder} holds no folder part-1, part-2, ... of --pack")
    facts = json.loads((parts[0] / CHECKSUMS).read_text(encoding="utf-8"))
    kept = work / "packed"
    kept.mkdir(parents=True, exist_ok=True)
    for part in parts:
        for piece in part.glob(f"{PIECES}.*"):
            shutil.copy(piece, kept)
    done = [_extract((parts[0] / ARCHIVE).read_bytes(), ARCHIVE, facts, work)]
    pieces = [kept / f"{PIECES}.{number}" for number in range(1, facts["num_parts"] + 1)]
    num_there = sum(piece.exists() for piece in pieces)
    if num_there < len(pieces):
        return [*done, f"{PIECES}: {num_there} of {len(pieces)} parts are here, so FlashAttention-4 must wait"]
    content = b"".join(piece.read_bytes() for piece in pieces)
    try:
        return [*done, _extract(content, PIECES, facts, work)]
    except ValueError as error:
        return [*done, str(error)]


def _extract(content: bytes, name: str, facts: dict[str, dict[str, str]], work: Path) -> str:
    """Extract an archive, unless an earlier call has. The stamp comes last: half an installation is repeated."""
    expected, stamp = facts["sha256"][name], work / f"{name}.installed"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == expected:
        return f"{name}: installed by an earlier call"
    if hashlib.sha256(content).hexdigest() != expected:
        raise ValueError(f"{name} is damaged: its parts do not match {CHECKSUMS}; copy them again")
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        with tarfile.open(fileobj=file, mode="r:xz") as archive:
            archive.extractall(work, filter="data")
    stamp.write_text(expected, encoding="utf-8")
    return f"{name}: installed in {work / SITE}"
