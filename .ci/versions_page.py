"""Write the page *Versions* of the documentation as Markdown, from the tables that the code uses.

python .ci/versions_page.py > docs/versions.md
"""

from __future__ import annotations

from penstock import _jax
from penstock._jaxlib_faults import CASES, FAULTS
from penstock._versions import JAX, PYTHON, SUPPORTED

_BEGINNING = f"""\
# Versions

<!-- Made by `python .ci/versions_page.py > docs/versions.md` from the tables that the code uses. -->

Every version between the oldest and the newest is supported. Some releases of jaxlib among them have faults, which are listed
below. The tests run with the oldest and the newest versions:

- all of them on Python {PYTHON.tested[-1]}, with the newest JAX, Flax, Keras and Grain; some of the slow ones
  only before a release;
- the quick ones on Python {PYTHON.tested[0]}, with JAX {JAX.tested[0]} and the nightly build of the next Keras, but not the
  tests of the benchmarks.

An older version is refused when penstock is imported, with one line that says what to install. A newer JAX is not refused. The
commands warn that it was not tested, and an error names any part of it that penstock needs and does not find. A newer Keras is
refused by `penstock.keras`, because that depends on the behaviour of Keras's trainer. `penstock doctor` shows your versions.
"""

_KNOWN_FAULTS = """\
## Known faults of jaxlib

Some releases compute wrong values on the CPU, or crash, in programs that other releases run correctly. `penstock doctor` runs a
reproduction of each fault, of three lines, in a process of its own. The commands warn of a jaxlib that fails, and the reports
of benchmarks record it. The first three are faults of XLA's YNNPACK fusions, which
`XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=` turns off; `penstock run` sets it for these jaxlibs. (In some programs,
these fusions are also slow: [jax#37465](https://github.com/jax-ml/jax/issues/37465).) The last fault was reported for jaxlib
0.10.2. The processors that we have compute it correctly: run the doctor on yours.
"""

_WORKAROUNDS = """\
## Faults of XLA that plans work around

A workaround applies only to the releases that need it. A test fails on the first release that no longer needs it.
"""

_PRIVATE = f"""\
## Private parts of JAX

penstock uses these, and an error names a part that a JAX does not have. All were last seen in JAX {JAX.tested[-1]}.
`tests/test_private.py` tests them, and other properties of JAX's equations that are not public, such as the parameters of a
`scan`.
"""


def page() -> str:
    """Return the page, as Markdown."""
    works = _table(
        ("", "supported", "tested", "to install"),
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
    """Return the versions without the name."""
    return works.partition(" ")[2]


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(page(), end="")
