"""Import a user's Python file, as running it would find its neighbours, but not as `__main__`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def import_file(path: Path) -> ModuleType:
    """Import a file once in a process; its folder comes first in `sys.path`, as for a program.

    Raises:
      ValueError: there is no such file, or the module of this name is another one.
      Exception: whatever the file raises when it is imported.
    """
    path = path.resolve()
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    name = path.stem
    if (there := sys.modules.get(name)) is not None:
        if Path(getattr(there, "__file__", None) or "").resolve() == path:
            return there
        raise ValueError(f"{path} cannot be imported: the module {name!r} is {there.__name__} of another place; rename the file")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
