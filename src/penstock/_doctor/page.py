"""The page *Versions* of the documentation, made from the tables that the code uses.

python -m penstock._doctor.page > docs/versions.md
"""

from __future__ import annotations

from penstock import _jax
from penstock._doctor.jaxlib_faults import CASES
from penstock._faults import FAULTS
from penstock._versions import JAX, PYTHON, SUPPORTED

_BEGINNING = f"""\
# Versions

<!-- Made by `python -m penstock._doctor.page > docs/versions.md` from the tables that the code uses. -->

Every version between the oldest and the newest is admitted; the faults that some jaxlibs among them have are below. The tests run
on both ends:

- all of them on Python {PYTHON.tested[-1]}, with the newest JAX, Flax, Keras and Grain;
- the quick ones on Python {PYTHON.tested[0]}, with JAX {JAX.tested[0]};
- those of `penstock.keras` on the nightly of the next Keras too.

An older version is refused when penstock is imported, in one line that says what to install. A newer JAX is not refused: the
commands warn that it was not tested, and where it lacks something that penstock relies on, the error says so. A newer Keras is
refused by `penstock.keras`, which relies on what Keras's trainer does. `penstock doctor` shows what you have.
"""

_KNOWN_FAULTS = """\
## Known faults of jaxlib

Some releases compute wrong values on the CPU, or crash, in programs that others run. `penstock doctor` runs a reproduction of
each, of three lines, in a process of its own; the commands warn of a jaxlib that fails, and reports of benchmarks record it. The
first three are faults of XLA's YNNPACK fusions, which `XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=` turns off. (In some
programs those also cost time: [jax#37465](https://github.com/jax-ml/jax/issues/37465).) The last was reported of jaxlib 0.10.2,
and is right on the processors that we have: run the doctor on yours.
"""

_WORKAROUNDS = """\
## Faults of XLA that plans work around

A workaround applies to the releases that need it, and a test fails on the first that no longer does.
"""

_PRIVATE = f"""\
## Private parts of JAX

penstock reads these, and says so where a JAX has none of them. All were last seen in JAX {JAX.tested[-1]}.
`tests/test_private.py` holds them, and whatever else of JAX's equations is no public promise, such as the parameters of a `scan`.
"""


def page() -> str:
    """Return the page, as Markdown."""
    works = _table(
        ("", "admitted", "tested", "to install"),
        [
            (each.name, _span(each.works), ", ".join(each.tested), f"`{each.install}`" if each.distribution else "")
            for each in SUPPORTED
        ],
    )
    releases = sorted({release for case in CASES for release, _ in case.fails})
    faults = _table(
        ("", "computes", *(f"jaxlib {release}" for release in releases), "others"),
        [
            (
                f"[jax#{case.link.rpartition('/')[2]}]({case.link})",
                case.name,
                *(dict(case.fails).get(release, "right") for release in releases),
                "right",
            )
            for case in CASES
        ],
    )
    workarounds = _table(
        ("fault", "what penstock does", "fixed in"),
        [(each.what, each.instead, f"jaxlib {'.'.join(map(str, each.fixed))}" if each.fixed else "not yet") for each in FAULTS],
    )
    private = "\n".join(f"- `{module}`: {' or '.join(f'`{name}`' for name in names)}" for module, *names in _jax.PARTS)
    sections = (_BEGINNING, works, _KNOWN_FAULTS, faults, _WORKAROUNDS, workarounds, _PRIVATE, private)
    return "\n".join(f"{section.rstrip()}\n" for section in sections)


def _span(works: str) -> str:
    """The versions without the name."""
    return works.partition(" ")[2]


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(page(), end="")
