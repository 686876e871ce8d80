"""Define the protocol of a data source, and make one of arrays, files, tables and data sets: `as_source`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from penstock.data.arrays import array_source, check_open, is_array, is_closed
from penstock.data.files import list_files
from penstock.data.image.files import ENDINGS as IMAGE_ENDINGS
from penstock.data.records import RecordSource, array_record
from penstock.data.remote.files import RemoteFiles, as_remote
from penstock.data.remote.url import file_name
from penstock.data.tree import Batch, Record, check_keys


@runtime_checkable
class Source(Protocol):
    """Random access to records, a batch at a time: any object with `__len__` and `read`.

    With `workers=N` threads, `read` must be safe to call from several threads. With `workers="process:N"`, the source must be
    picklable. A source may have a method `describe() -> str`. Its result becomes a part of the saved state of a feed, and is
    compared when the state is restored.

    Examples:
      >>> class Squares:
      ...     def __len__(self):
      ...         return 1_000_000
      ...
      ...     def read(self, indices):  # int64 [n], in any order, possibly repeated
      ...         return {"x": indices, "y": indices**2}
      >>> isinstance(Squares(), ps.Source)
      True
      >>> ps.Loader(Squares(), batch_size=4)[1]["y"].tolist()
      [16, 25, 36, 49]
    """

    def __len__(self) -> int:
        """Return the number of records."""

    def read(self, indices: np.ndarray) -> Batch | list[Record]:
        """Read records.

        Args:
          indices: int64 [n], in any order, possibly repeated.

        Returns:
          A pytree of arrays [n, ...], which the caller may keep and write to. Or a list of n records, each a pytree: the `Loader`
          passes them to `transform=ps.per_record(...)`, and then collates them.
        """


def as_source(data: Any) -> Source:
    """Make a `Source` of data.

    Args:
      data: one of the following, tried in this order:

        - a `Source`;
        - one path or URL, a list of them, or the result of `ps.remote`, of Parquet, Arrow IPC or ArrayRecord files, all of one
          kind;
        - a `pyarrow.Table`, a Hugging Face `datasets.Dataset`, a `pandas.DataFrame`, or a table of another library that exports
          Arrow's C stream, such as a polars `DataFrame`;
        - a pytree (one array, or nested dicts and tuples) of NumPy arrays, memmaps, h5py datasets, zarr arrays or torch tensors;
        - a mapping of arrays, such as a loaded `.npz` file;
        - an h5py file or group, or a zarr group; the groups inside of it become nested dicts;
        - any object with `__len__`, and `__getitem__` or `__getitems__`: a list of records, a torch `Dataset` (also one that has
          a method `read`), a Grain or TFDS source.

    Returns:
      An object with `__len__` and `read(indices)`.

    Raises:
      TypeError: `data` is none of these, or holds arrays that are masked, sparse or ragged.
      ValueError: arrays have different lengths, the length 0 or no leading dimension; two columns have the same name.
      FileNotFoundError: a path does not exist.

    Examples:
      >>> as_source({"x": np.arange(10)}).read(np.array([3, 1]))
      {'x': array([3, 1])}
    """
    if isinstance(data, type):
        raise TypeError(f"got the class {data.__name__}, not an object of it: did you mean {data.__name__}(...)?")
    if hasattr(data, "producers"):  # a Loader or Steps, whose items are batches
        raise TypeError(f"got a {type(data).__name__}, which gives batches and not records: give the data that it is made of")
    if isinstance(data, Source) and not _is_torch_dataset(data):
        return data
    if (remote := as_remote(data)) is not None:
        return _from_files(remote, [file_name(url) for url in remote.urls])
    if paths := _paths(data):
        return _from_files(paths, paths)
    package = type(data).__module__.partition(".")[0]
    if package == "pyarrow":
        from penstock.data.arrow import ArrowSource

        return ArrowSource(data)
    if package == "datasets" and isinstance(data, dict):
        first = next(iter(data), "train")
        raise TypeError(f"got a {type(data).__name__} of {list(data)}: give one of them, such as data[{first!r}]")
    if package == "datasets" and hasattr(data, "__getitems__"):
        from penstock.data.arrow import from_datasets

        return from_datasets(data) or RecordSource(data)
    if package == "pandas" and hasattr(data, "columns"):
        data = _columns(data)
    elif hasattr(data, "__arrow_c_stream__") and not is_array(data):  # a table of polars or another library, and no column
        from penstock.data.arrow import ArrowSource

        return ArrowSource(data)
    if hasattr(data, "collect") and not hasattr(data, "__len__"):  # a LazyFrame of polars, for example
        raise TypeError(f"got a {type(data).__name__} of {package}, which has no rows yet: give the result of its .collect()")
    if package == "ray":
        raise TypeError(f"got a {type(data).__name__} of Ray: give penstock.ray.source(dataset), which makes a source of it")
    if is_closed(data):
        check_open(data)
    if package in ("h5py", "zarr") and hasattr(data, "keys"):
        data = _members(data)
    # JAX takes an .npz file or a UserDict for a leaf. A sparse matrix by keys of SciPy is a dict too.
    if isinstance(data, Mapping) and jax.tree_util.all_leaves([data]) and not is_array(data):
        data = dict(data)
    if _holds_arrays(data):
        return array_source(data)
    if hasattr(data, "__len__") and (hasattr(data, "__getitem__") or hasattr(data, "__getitems__")):
        return RecordSource(data)
    raise TypeError(
        f"cannot read records from {type(data).__name__}: a Loader needs random access, that is, arrays, files, or an object "
        "with __len__ and __getitem__ (or read). An iterable of ready batches needs no Loader: pass it to ps.feed."
    )


def _is_torch_dataset(data: Any) -> bool:
    return any(kind.__module__.startswith("torch.utils.data") for kind in type(data).__mro__)


def _columns(frame: Any) -> dict[str, np.ndarray]:
    names = [str(name) for name in frame.columns]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"the DataFrame has several columns {twice[0]!r}: rename or drop all but one")
    return {name: column.to_numpy() for name, (_, column) in zip(names, frame.items(), strict=True)}


def _members(group: Any) -> dict[str, Any]:
    """Collect the arrays of an h5py or zarr group. Its inner groups become nested dicts."""
    members = {}
    for name in group:
        member = group[name]
        if is_array(member):
            members[str(name)] = member
        elif hasattr(member, "keys") and (inner := _members(member)):
            members[str(name)] = inner
    return members


def _holds_arrays(data: Any) -> bool:
    if isinstance(data, (dict, tuple)):  # always a pytree; ArraySource names a leaf that is not an array
        check_keys(data)
        return bool(jax.tree_util.tree_leaves(data))
    if is_array(data) or isinstance(data, (list, Iterator)):
        return is_array(data)
    leaves = jax.tree_util.tree_leaves(data, is_leaf=lambda x: isinstance(x, Iterator))
    return bool(leaves) and all(map(is_array, leaves))  # for example of a registered dataclass


def _paths(data: Any) -> list[str]:
    many = data if isinstance(data, (list, tuple)) else [data]
    if not many or not all(isinstance(path, (str, os.PathLike)) for path in many):
        return []
    return [os.path.expanduser(os.fspath(path)) for path in many]


def _from_files(paths: list[str] | RemoteFiles, names: list[str]) -> Source:
    for endings, extra, reader in _READERS:
        if all(name.endswith(endings) for name in names):
            try:
                return reader(paths)
            except ModuleNotFoundError as error:
                message = f'reading {names[0]!r} needs {error.name}: pip install "penstock[{extra}]"'
                raise ModuleNotFoundError(message, name=error.name) from error
    if paths is names:
        if folder := next(filter(os.path.isdir, names), None):
            raise TypeError(
                f"{folder!r} is a folder: ps.Loader(ps.images({folder!r}, size=224), ...) reads the images in it, and a pattern "
                f"such as {os.path.join(folder, '*.parquet')!r} reads other files. zarr.open(path) opens a zarr folder."
            )
        try:
            list_files(paths)
        except FileNotFoundError as error:
            if isinstance(paths, list) and len(paths) > 1:
                raise FileNotFoundError(
                    f"{error}. A list of texts is a list of paths: give texts as records, [{{'text': text}} for text in texts]"
                ) from None
            raise
    for endings, remedy in _REMEDIES:
        if names[0].lower().endswith(endings):
            raise TypeError(f"a Loader does not read {names[0]!r} itself: {remedy}")
    known = ", ".join(ending for endings, _, _ in _READERS for ending in endings)
    path = "path" if paths is names else "ps.local(url)"
    raise TypeError(
        f"cannot tell what {names[0]!r} holds{' and the others hold' if len(names) > 1 else ''}: known endings are "
        f"{known}. Other files can be opened first: np.load({path}, mmap_mode='r'), h5py.File({path})['x'], zarr.open({path})."
    )


def _read_parquet(paths: Any) -> Source:
    from penstock.data.arrow import parquet

    return parquet(paths)


def _read_ipc(paths: Any) -> Source:
    from penstock.data.arrow import ipc

    return ipc(paths)


# File name endings, the extra that installs what the reader needs, and the reader.
_READERS: list[tuple[tuple[str, ...], str, Callable[[Any], Source]]] = [
    ((".parquet", ".pq"), "arrow", _read_parquet),
    ((".arrow", ".feather"), "arrow", _read_ipc),
    ((".array_record", ".arrayrecord", ".array_records"), "arrayrecord", array_record),
]

# File name endings, and the function that reads such files.
_REMEDIES: list[tuple[tuple[str, ...], str]] = [
    (IMAGE_ENDINGS, "ps.Loader(ps.images(folder, size=224), ...) reads the images of a folder"),
    ((".jsonl", ".jsonl.gz", ".json"), "ps.stream(ps.jsonl(paths), ...) reads files with one JSON value on each line"),
    ((".tar", ".tar.gz", ".tgz"), "ps.stream(ps.webdataset(paths), ...) reads tar files"),
    ((".csv", ".tsv"), "ps.Loader(pandas.read_csv(path), ...) reads a table of text"),
]


def describe_source(source: Source) -> str:
    """Return the result of `describe()` of a source, or the name of its class."""
    describe = getattr(source, "describe", None)
    return str(describe()) if callable(describe) else type(source).__name__
