"""The messages for versions that penstock does not work with, and the one table of those that do."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

from penstock._versions import JAX, KERAS, PYTHON, RAY, SUPPORTED, keras_version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(*arguments: str, path: Path | None = None, isolated: bool = False) -> subprocess.CompletedProcess[str]:
    """Run Python with `path` before everything else that is installed; isolated, with nothing installed."""
    folders = [str(folder) for folder in (path, ROOT / "src") if folder]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, *(["-S"] if isolated else []), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def pretend(folder: Path, distribution: str, version: str) -> Path:
    """Put the metadata of another version where it is found first."""
    info = folder / f"{distribution}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    return folder


def assert_one_line(ended: subprocess.CompletedProcess[str], *words: str) -> None:
    assert ended.returncode != 0
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    for word in words:
        assert word in ended.stderr


@pytest.mark.parametrize("arguments", [("-c", "import penstock"), ("-m", "penstock", "doctor")])
def test_an_old_jax_is_refused_in_one_line(tmp_path, arguments):
    ended = run(*arguments, path=pretend(tmp_path, "jax", "0.9.2"))
    assert_one_line(ended, "JAX 0.9.2", "JAX 0.10 to 0.12", 'pip install "jax>=0.10,<0.13"')


def test_an_old_python_is_refused_in_one_line():
    ended = run("-c", "import sys; sys.version_info = (3, 10, 13, 'final', 0); import penstock")
    assert_one_line(ended, "Python 3.10.13", "Python 3.11 to 3.13")


def test_without_jax_one_line_says_how_to_install_it():
    assert_one_line(run("-c", "import penstock", isolated=True), "JAX 0.10 to 0.12", "not installed", "pip install")


def test_the_error_can_be_caught_as_an_import_error(tmp_path):
    script = "try:\n    import penstock\nexcept ImportError as error:\n    print(type(error).__name__)"
    ended = run("-c", script, path=pretend(tmp_path, "jax", "0.9.2"))
    assert (ended.stdout, ended.stderr) == ("UnsupportedVersionError\n", "")


def test_other_errors_keep_their_traceback_after_a_refusal(tmp_path):
    script = "try:\n    import penstock\nexcept ImportError:\n    1 / 0"
    ended = run("-c", script, path=pretend(tmp_path, "jax", "0.9.2"))
    assert "Traceback" in ended.stderr
    assert "ZeroDivisionError" in ended.stderr


def test_a_newer_jax_is_imported_and_named_by_the_commands(tmp_path):
    path = pretend(tmp_path, "jax", "99.0")
    (tmp_path / "steps.py").write_text(
        "import jax\ndef job():\n    w = jax.ShapeDtypeStruct((8, 8), 'float32')\n    return lambda w, b: w + b, w, w\n"
    )
    ended = run("-m", "penstock", "plan", "steps:job", "--devices", "2", "--hardware", "tpu-v5e", path=path)
    assert ended.returncode == 0, ended.stderr
    assert sum("JAX 99.0 is newer than JAX 0.10 to 0.12" in line for line in ended.stderr.splitlines()) == 1


def test_a_jax_without_its_jaxlib_is_refused_in_one_line(tmp_path):
    script = "import importlib.metadata as m; real = m.version\n"
    script += "def version(name):\n    if name == 'jaxlib': raise m.PackageNotFoundError(name)\n    return real(name)\n"
    script += "m.version = version\nimport penstock"
    assert_one_line(run("-c", script), "needs jaxlib", 'pip install "jaxlib==')


def test_a_module_that_stands_in_the_place_of_keras_has_its_version(monkeypatch):
    monkeypatch.setitem(sys.modules, "keras", types.ModuleType("keras"))
    assert keras_version() is None


@pytest.mark.parametrize(
    ("supported", "works", "fails", "newer"),
    [
        (JAX, ["0.10.0", "0.10.2", "0.11.1", "0.12.0.1", "0.12.1.dev20261101"], ["0.9.2", "0.4.38", "1.0", "0.13.0"], "0.13.0"),
        (KERAS, ["3.15.0", "3.15.1", "3.16.0.dev2026102704", "3.16.0"], ["3.14.1", "2.15.0", "4.0", "3.17.0"], "3.17.0"),
        (PYTHON, ["3.11.7", "3.12.1", "3.13.0"], ["3.10.13", "3.14.0", "2.7"], "3.14.0"),
    ],
)
def test_versions_are_compared_by_number(supported, works, fails, newer):
    assert all(version in supported for version in works)
    assert not any(version in supported for version in fails)
    assert supported.is_newer(newer)
    assert not any(supported.is_newer(version) for version in works)


def test_what_pip_installs_is_what_the_table_says():
    assert JAX.requirement in PROJECT["dependencies"]
    assert KERAS.requirement in PROJECT["optional-dependencies"]["keras"]
    assert RAY.requirement in PROJECT["optional-dependencies"]["ray"]
    assert PROJECT["requires-python"] == f">={'.'.join(map(str, PYTHON.oldest))}"
    for version in PYTHON.tested:
        assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]


def test_what_is_tested_is_supported():
    for supported in SUPPORTED:
        assert all(version in supported for version in supported.tested)


def test_the_version_of_keras_is_that_of_the_package_and_not_of_a_distribution(tmp_path, monkeypatch):
    assert keras_version() in KERAS
    pretend(tmp_path, "keras", "3.1.0")
    (tmp_path / "keras" / "src").mkdir(parents=True)
    (tmp_path / "keras" / "__init__.py").write_text("raise AssertionError('imported')")
    (tmp_path / "keras" / "src" / "version.py").write_text('__version__ = "3.16.0.dev2026102704"\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    assert keras_version() == "3.16.0.dev2026102704"


def test_the_readme_names_the_versions_that_are_tested():
    readme = (ROOT / "README.md").read_text()
    for supported in SUPPORTED:
        for version in supported.tested:
            assert version in readme, f"{supported.name} {version}"


def test_the_page_of_versions_is_made_from_the_table():
    made = run(".ci/versions_page.py").stdout
    assert (ROOT / "docs" / "versions.md").read_text() == made, "python .ci/versions_page.py > docs/versions.md"
