"""Read host batches and place them on the devices, ahead of the training step.

`penstock.feed` is both this package and the function: `ps.feed(loader)` calls `feed`.
"""

import importlib
import inspect
import sys
from types import ModuleType
from typing import Any

from penstock.feed.device_feed import Feed as Feed
from penstock.feed.device_feed import feed as feed
from penstock.feed.stats import Stats as Stats

__all__ = ["Feed", "Stats", "feed"]


class _CallablePackage(ModuleType):
    """A package that is called as its function of the same name. Otherwise that function would hide the package."""

    __call__ = staticmethod(feed)
    __signature__ = inspect.signature(feed)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the package by its name, as cloudpickle does with a plain module."""
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _CallablePackage
