"""A plugin of pytest: how each test ended, and who read the batches of its epochs.

    python -m pytest -p keras_watch --watch-report PATH ...

Written as JSON when pytest is done, for `keras_own_tests.py`.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_RANKS = ("passed", "skipped", "failed")  # of a test's setup, call and teardown, the last in this order is its outcome

_outcomes: dict[str, str] = {}
_texts: dict[str, str] = {}  # why a test failed
_readers: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)  # of each test's batches


class _Watched(Iterator):
    """Batches of one epoch; notes the thread that takes one, for the test that began the epoch."""

    def __init__(self, batches: Any, module: str):
        self._batches, self._module, self._test = iter(batches), module, _current_test()

    def __next__(self) -> Any:
        batch = next(self._batches)
        _readers[self._test].add((self._module, threading.current_thread().name))
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def _current_test() -> str:
    return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]  # without "(call)"


def pytest_addoption(parser):
    parser.addoption("--watch-report", type=Path, required=True)


def pytest_configure():
    from keras.src.trainers import data_adapters, epoch_iterator  # noqa: F401  # defines all adapters
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter

    _note_who_iterates(epoch_iterator.EpochIterator)
    for adapter in DataAdapter.__subclasses__():
        _watch(adapter)
    if (epochs := sys.modules.get("penstock.keras.epoch_iterator")) is not None:
        _watch_generators(epochs)


def _note_who_iterates(iterator: Any) -> None:
    begin = iterator.__init__

    @functools.wraps(begin)
    def noted(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        self.data_adapter.iterated_by = type(self).__module__

    iterator.__init__ = noted


def _watch(adapter: Any) -> None:
    read = adapter.get_jax_iterator

    @functools.wraps(read)
    def watched(self, *args, **kwargs):  # versions of Keras differ in the arguments
        batches = read(self, *args, **kwargs)
        # A test of the adapter itself has it without an epoch iterator.
        return _Watched(batches, self.iterated_by) if hasattr(self, "iterated_by") else batches

    adapter.get_jax_iterator = watched


def _watch_generators(epochs: Any) -> None:
    """Watch the generators themselves: penstock reads a generator, and not Keras's adapter of it."""
    convert = epochs._to_jax_batch

    @functools.wraps(convert)
    def watched(batch):
        _readers[_current_test()].add((epochs.__name__, threading.current_thread().name))
        return convert(batch)

    epochs._to_jax_batch = watched


def pytest_runtest_logreport(report):
    _note(report)


def pytest_collectreport(report):
    if not report.passed:  # a module that cannot be imported is a test that fails
        _note(report)


def _note(report: Any) -> None:
    before = _outcomes.get(report.nodeid, "passed")
    _outcomes[report.nodeid] = max(before, report.outcome, key=_RANKS.index)
    if report.failed:
        _texts[report.nodeid] = _texts.get(report.nodeid, "") + report.longreprtext


def pytest_sessionfinish(session):
    import keras
    from keras.src.backend.jax import trainer

    tests = {
        name: {"outcome": outcome, "readers": sorted(_readers[name]), "text": _texts.get(name, "")}
        for name, outcome in _outcomes.items()
    }
    report = {"keras": keras.__version__, "iterator": trainer.JAXEpochIterator.__module__, "tests": tests}
    session.config.getoption("watch_report").write_text(json.dumps(report))
