"""Tar headers against the standard library's reader, and hostile archives."""

import gzip
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.data.formats.tar_members import TAR_BLOCK_BYTES, BadTarMember, read_tar_members
from mmtrain.data.media.media_bytes import TarMember
from mmtrain.recipe.settings.data_settings import LimitSettings

LIMITS = LimitSettings()
NAMES = st.text("abcé.-_ 0", min_size=1, max_size=120).filter(lambda n: n.strip(". ") and not n.endswith(" "))


def _archive(files: dict[str, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def _member(kind: bytes, name: str = "x", size: int = 0) -> bytes:
    """Return a single header of a type that is not a plain file."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, "/etc/passwd", size
    return info.tobuf(tarfile.GNU_FORMAT)


def _read(path: Path, content: bytes, limits: LimitSettings = LIMITS) -> list[TarMember | BadTarMember]:
    path.write_bytes(content)
    return list(read_tar_members(path, limits))


@given(
    st.lists(st.tuples(st.lists(NAMES, min_size=1, max_size=3), st.binary(max_size=1100)), max_size=6),
    st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_members_equal_those_of_the_standard_library(
    tmp_path_factory: pytest.TempPathFactory, files: list[tuple[list[str], bytes]], form: int
) -> None:
    content = _archive({"/".join(parts): body for parts, body in files}, form)
    path = tmp_path_factory.mktemp("tar") / "a.tar"
    members = _read(path, content)
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        expected = [(info.name, info.offset_data, info.size) for info in tar]
    assert [(m.name, m.offset, m.size) for m in members if isinstance(m, TarMember)] == expected
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        for member, info in zip(members, tar, strict=True):
            assert isinstance(member, TarMember)
            body = tar.extractfile(info)
            assert body is not None
            with member.open() as file:
                assert file.read() == body.read()


def test_old_headers_with_prefixes_and_folders_are_read(tmp_path: Path) -> None:
    long = "a" * 90 + "/" + "b" * 60
    folder = tarfile.TarInfo("folder/")
    folder.type = tarfile.DIRTYPE
    content = folder.tobuf(tarfile.USTAR_FORMAT) + _archive({long: b"x", "c": b"y"}, tarfile.USTAR_FORMAT)
    assert [m.name for m in _read(tmp_path / "a.tar", content)] == [long, "c"]


def test_a_member_is_a_file_of_its_own(tmp_path: Path) -> None:
    first, second = _read(tmp_path / "a.tar", _archive({"a": b"0123456789", "b": b"secret"}))
    assert isinstance(first, TarMember)
    assert isinstance(second, TarMember)
    with first.open() as file:
        assert (file.read(4), file.tell(), file.seek(-2, 2), file.read(99)) == (b"0123", 4, 8, b"89")
        assert (file.seek(50), file.read(), file.seek(0), file.read()) == (50, b"", 0, b"0123456789")
        with pytest.raises(OSError, match="seek"):
            file.seek(-1)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (tarfile.SYMTYPE, "a symbolic link"),
        (tarfile.LNKTYPE, "a hard link"),
        (tarfile.CHRTYPE, "a device"),
        (tarfile.BLKTYPE, "a device"),
        (tarfile.FIFOTYPE, "a pipe"),
        (tarfile.GNUTYPE_SPARSE, "a sparse file"),
    ],
)
def test_members_that_are_not_plain_files_are_rejected_and_the_rest_is_read(
    tmp_path: Path, kind: bytes, what: str
) -> None:
    bad, good = _read(tmp_path / "a.tar", _member(kind) + _archive({"b": b"y"}))
    assert isinstance(bad, BadTarMember)
    assert (bad.name, bad.kind) == ("x", "tar_member")
    assert f"is {what}; only plain files are read" in bad.reason
    assert isinstance(good, TarMember)


def test_sparse_files_of_pax_are_rejected(tmp_path: Path) -> None:
    info = tarfile.TarInfo("x")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.realsize": "1000000000000"}
    (bad,) = _read(tmp_path / "a.tar", info.tobuf(tarfile.PAX_FORMAT) + bytes(2 * TAR_BLOCK_BYTES))
    assert isinstance(bad, BadTarMember)
    assert "a sparse file" in bad.reason


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", "a/../../up", "a\nb", "\x1b[2J"])
def test_names_that_lead_out_or_are_unprintable_are_rejected(tmp_path: Path, name: str) -> None:
    bad, good = _read(tmp_path / "a.tar", _archive({name: b"x", "b": b"y"}))
    assert isinstance(bad, BadTarMember)
    assert (bad.name, bad.kind) == (name, "tar_name")
    assert isinstance(good, TarMember)


def test_sizes_and_counts_are_capped(tmp_path: Path) -> None:
    content = _archive({"a": b"x" * 11, "b": b"y" * 10, "c": b"", "d": b""})
    limits = LimitSettings(max_member_bytes=10, max_members=3)
    large, fits, _, rest = _read(tmp_path / "a.tar", content, limits)
    assert isinstance(large, BadTarMember)
    assert isinstance(fits, TarMember)
    assert isinstance(rest, BadTarMember)
    assert (large.kind, rest.kind) == ("tar_member_size", "tar_too_many")
    assert "data.limits.max_member_bytes = 10" in large.reason
    assert "data.limits.max_members = 3" in rest.reason


def _lying_size(field: bytes) -> bytes:
    header = bytearray(_archive({"a": b"x"})[:TAR_BLOCK_BYTES])
    header[124:136] = field
    header[148:156] = b"%06o\0 " % (sum(header) - sum(header[148:156]) + 8 * 32)
    return bytes(header)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: gzip.compress(_archive({"a": b"x"}) + bytes(1 << 20)), "it is compressed; unpack it"),
        (lambda: b"hello" * 1000, "no tar header at byte 0"),
        (lambda: _lying_size(b"\x80" + b"\xff" * 11), "it ends inside of member 'a'"),
        (lambda: _lying_size(b"\xff" * 12), "a header with the number"),
        (lambda: _lying_size(b"77777777777\0"), "it ends inside of member 'a'"),
        (lambda: _member(b"x", size=1 << 40), "a name or pax header of 1099511627776 bytes"),
        (lambda: _member(b"L", size=1 << 21) + bytes(1 << 21), "a name or pax header of 2097152 bytes"),
        (lambda: _member(b"x", size=9) + b"99999 a=b".ljust(TAR_BLOCK_BYTES, b"\0"), "a damaged pax header"),
        (lambda: _member(b"Q"), "is of unknown type b'Q'"),
    ],
)
def test_broken_archives_are_quarantined(tmp_path: Path, make: Callable[[], bytes], reason: str) -> None:
    (bad,) = _read(tmp_path / "a.tar", make())
    assert isinstance(bad, BadTarMember)
    assert bad.kind == "tar_broken"
    assert reason in bad.reason


def test_a_truncated_archive_yields_its_intact_members(tmp_path: Path) -> None:
    content = _archive({"a": b"x" * 700, "b": b"y" * 20, "c" * 150: b"z" * 600})
    intact = [m for m in _read(tmp_path / "a.tar", content) if isinstance(m, TarMember)]
    for end in range(1, len(content), 61):
        members = _read(tmp_path / "a.tar", content[:end])
        good = [m for m in members if isinstance(m, TarMember)]
        assert good == intact[: len(good)]
        assert all(m.offset + m.size <= end for m in good)
        assert len(good) == len(intact) or len(members) > len(good), "members are missing without a report"


def test_a_second_archive_in_one_file_is_quarantined(tmp_path: Path) -> None:
    good, bad = _read(tmp_path / "a.tar", _archive({"a": b"x"}) + _archive({"b": b"y"}))
    assert isinstance(good, TarMember)
    assert isinstance(bad, BadTarMember)
    assert "data follows its end" in bad.reason


@given(st.data())
def test_damaged_archives_never_do_more_than_lose_members(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(_archive({"a": b"x" * 700, "c" * 150: b"z" * 600}))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.tar"
    for member in _read(path, bytes(content)):
        if isinstance(member, TarMember):
            assert 0 <= member.offset <= member.offset + member.size <= len(content)


def test_headers_of_old_and_rare_archivers_are_read(tmp_path: Path) -> None:
    """A volume label, pax headers of Solaris, and attributes of macOS that are longer than a name may be."""
    info = tarfile.TarInfo("a.png")
    info.size = 3
    info.pax_headers = {"SCHILY.xattr.com.apple.ResourceFork": "x" * 200_000}
    headers = bytearray(info.tobuf(tarfile.PAX_FORMAT))
    headers[148:157] = b"%06o\0 X" % (sum(headers[:148]) + 8 * 32 + sum(headers[156:512]) + ord("X") - ord("x"))
    content = _member(b"V", "backup") + bytes(headers) + b"png".ljust(512, b"\0") + bytes(1024)
    (member,) = _read(tmp_path / "a.tar", content)
    assert isinstance(member, TarMember)
    with tarfile.open(tmp_path / "a.tar") as archive:
        assert [other.name for other in archive if other.type in tarfile.REGULAR_TYPES] == [member.name]
    assert member.open().read() == b"png"


def test_sums_of_signed_bytes_are_accepted(tmp_path: Path) -> None:
    header = bytearray(tarfile.TarInfo("é.png").tobuf(tarfile.USTAR_FORMAT, "latin-1"))
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + 8 * 32 + sum(header[156:]) - 256)
    (member,) = _read(tmp_path / "a.tar", bytes(header) + bytes(1024))
    assert isinstance(member, TarMember)
    with tarfile.open(tmp_path / "a.tar") as archive:
        assert len(archive.getmembers()) == 1
