"""A folder passes its manifest only if every file is as it was when the manifest was written."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.train.manifest import NAME, damage, is_finished, write_manifest

FILES = {"a.bin": bytes(range(200)), "deep/er/b.bin": b"\x00" * 300, "empty": b""}


@pytest.fixture
def folder(tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    write_manifest(tmp_path)
    return tmp_path


def test_folder_as_written_has_no_damage(folder):
    assert is_finished(folder)
    assert damage(folder) is None


def test_folder_without_manifest_is_unfinished(folder):
    (folder / NAME).unlink()
    assert not is_finished(folder)
    assert "unfinished" in damage(folder)


@pytest.mark.parametrize("name", FILES)
def test_missing_file_is_named(folder, name):
    (folder / name).unlink()
    assert damage(folder) == f"{name} is missing"


def test_truncated_file_is_named_with_both_sizes(folder):
    (folder / "deep/er/b.bin").write_bytes(b"\x00" * 299)
    assert damage(folder) == "deep/er/b.bin has 299 bytes and had 300 when it was written"


def test_file_in_place_of_a_folder_is_damage(folder):
    (folder / "a.bin").unlink()
    (folder / "a.bin").mkdir()
    assert damage(folder)


@given(st.data())
def test_any_flipped_bit_is_found(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("flipped")
    (folder / "x").write_bytes(bytes(range(64)))
    write_manifest(folder)
    name = data.draw(st.sampled_from(["x", NAME]))
    content = bytearray((folder / name).read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= 1 << data.draw(st.integers(0, 7))
    (folder / name).write_bytes(content)
    try:  # white space of JSON may change without a change of what it says
        same = name == NAME and json.loads(content) == json.loads(_manifest_of(folder))
    except ValueError:
        same = False
    assert same or damage(folder)


def _manifest_of(folder: Path) -> str:
    changed = (folder / NAME).read_bytes()
    write_manifest(folder)
    text = (folder / NAME).read_text()
    (folder / NAME).write_bytes(changed)
    return text


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": {}}', '{"version": 1, "files": 3, "sha256": ""}', "\x00\xff"])
def test_manifest_that_is_not_one_is_damage(folder, text):
    (folder / NAME).write_text(text, encoding="latin-1")
    assert NAME in damage(folder)


def test_manifest_of_a_later_version_says_so(folder):
    manifest = json.loads((folder / NAME).read_text())
    (folder / NAME).write_text(json.dumps({**manifest, "version": 2}))
    assert "version 2" in damage(folder)
