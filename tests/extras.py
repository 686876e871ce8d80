"""Optional libraries in tests: a test without its library is skipped, and the reason names the extra that has it."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

_PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
_DISTRIBUTIONS = {
    "PIL": "pillow",
    "cv2": "opencv-python-headless",
    "array_record": "array-record",
    "keras_hub": "keras-hub",
    "sklearn": "scikit-learn",
    "orbax": "orbax-checkpoint",
}


def require(module: str) -> ModuleType:
    """Import an optional library, or skip the test, or all tests of the file that calls this at its top."""
    __tracebackhide__ = True  # so that the report of skipped tests names the test's file
    return pytest.importorskip(module, reason=f"needs {module}: {remedy(module)}")


def in_an_extra(module: str) -> bool:
    """Return whether an extra of penstock has a library."""
    return bool(_extras(module))


def remedy(module: str) -> str:
    """Return the command that installs the extra with a library."""
    extras = _extras(module)
    assert extras, f"{module} is in no extra of pyproject.toml"
    return f'pip install -e ".[{extras[0]}]"'


@functools.cache
def _extras(module: str) -> list[str]:
    module = module.partition(".")[0]
    distribution = _DISTRIBUTIONS.get(module, module).lower()
    extras = _PROJECT["optional-dependencies"]
    return [name for name, needs in extras.items() if any(_name(each) == distribution for each in needs)]


def _name(requirement: str) -> str:
    name = requirement.replace("_", "-").lower()
    for end in "[<>=!~; ":
        name = name.partition(end)[0]
    return name
