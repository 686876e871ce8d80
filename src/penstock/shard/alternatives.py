"""Plans by name, each of which is made when it is first read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

Made = TypeVar("Made")


class Alternatives(Mapping[str, Made], Generic[Made]):
    """The baselines of a plan, or the options of a refused step, by name. Each is made once, when it is first read.

    >>> made = Alternatives({"FSDP": lambda: "a plan"})
    >>> made["FSDP"], list(made)
    ('a plan', ['FSDP'])
    """

    def __init__(self, writers: Mapping[str, Callable[[], Made]]) -> None:
        self._writers = dict(writers)
        self._written: dict[str, Made] = {}

    def __getitem__(self, name: str) -> Made:
        if name not in self._writers:
            raise KeyError(f"there is no alternative {name!r}; there are {', '.join(map(repr, self._writers)) or 'none'}")
        if name not in self._written:
            self._written[name] = self._writers[name]()
        return self._written[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._writers)

    def __len__(self) -> int:
        return len(self._writers)

    def __repr__(self) -> str:
        return f"<Alternatives: {', '.join(self._writers) or 'none'}>"
