"""Messages about missing files show how the path differs from the name that may be meant."""

from pathlib import Path

import pytest

from mmtrain.data.media import nearest_name
from mmtrain.data.media.images import BadImageError, read_image_size
from mmtrain.data.media.media_bytes import FileMedia

COMPOSED, DECOMPOSED = "caf\u00e9.png", "cafe\u0301.png"


@pytest.mark.parametrize(
    ("existing", "asked", "message"),
    [
        ("a.png", "a.png ", "a.png ': no such file; did you mean 'a.png' in place of 'a.png '?"),
        ("a.png ", "a.png", "a.png: no such file; did you mean 'a.png ' in place of 'a.png'?"),
        ("a.png", "a.png\u00a0", r"did you mean 'a.png' in place of 'a.png\xa0'?"),
        ("a.png", "\u200ba.png", r"did you mean 'a.png' in place of '\u200ba.png'?"),
        ("a b.png", "a\u00a0b.png", r"did you mean 'a b.png' in place of 'a\xa0b.png'?"),
        ("a b.png", "a  b.png", "did you mean 'a b.png' in place of 'a  b.png'?"),
        ("a.png", "a.png\r", r"did you mean 'a.png' in place of 'a.png\r'?"),
        ("a.png", "A.PNG", "did you mean 'a.png' in place of 'A.PNG'?"),
        ("a.png", "a.jpg", "did you mean 'a.png' in place of 'a.jpg'?"),
        (DECOMPOSED, COMPOSED, r"did you mean 'cafe\u0301.png' in place of 'caf\xe9.png'?"),
        ("scan_a.png", "scan_\u0430.png", r"did you mean 'scan_a.png' in place of 'scan_\u0430.png'?"),
        ("照片一.png", "照片一.jpg", "did you mean '照片一.png' in place of '照片一.jpg'?"),
    ],
)
def test_names_that_look_alike_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: str, asked: str, message: str
) -> None:
    monkeypatch.setattr(nearest_name, "_num_suggestions", 0)
    (tmp_path / existing).write_bytes(b"")
    with pytest.raises(BadImageError) as missing:
        read_image_size(FileMedia(str(tmp_path / asked)), 100)
    assert str(missing.value).endswith(message)


def test_a_folder_with_a_trailing_blank_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearest_name, "_num_suggestions", 0)
    (tmp_path / "images").mkdir()
    with pytest.raises(BadImageError, match=r"no folder '.*images '; did you mean 'images' in place of 'images '\?"):
        read_image_size(FileMedia(f"{tmp_path}/images /a.png"), 100)
