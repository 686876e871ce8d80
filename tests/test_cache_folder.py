"""The user's cache folder, also for a user who has none."""

from pathlib import Path

import pytest

from penstock import _cache_folder
from penstock._cache_folder import user_cache
from penstock.data.remote.cache import open_cache


@pytest.fixture
def no_home(monkeypatch):
    def raises():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("PENSTOCK_CACHE", raising=False)
    monkeypatch.setattr(_cache_folder.Path, "home", raises)


def test_the_folder_is_in_xdg_cache_home_or_in_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache() == tmp_path / "penstock"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache() == Path.home() / ".cache" / "penstock"


def test_a_user_without_a_home_has_none(no_home):
    assert user_cache() is None


def test_remote_files_of_a_user_without_a_home_need_a_folder(no_home, monkeypatch, tmp_path):
    with pytest.raises(OSError, match=r"no home .*set PENSTOCK_CACHE, or pass cache="):
        open_cache(None)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    assert open_cache(None).folder == str(tmp_path / "cache")
