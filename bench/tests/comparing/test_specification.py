from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_bench.comparing.specification import Specification, is_function, kind_of, names_of


def test_functions_and_commands_are_told_apart():
    assert kind_of(["train.py:a", "folder/train.py:b"]) == "functions"
    assert kind_of(["python a.py", "python b.py"]) == "commands"
    assert kind_of(["./run", "python train.py:x 3"]) == "commands"
    assert not is_function("train.py")
    assert not is_function("train.py:a-b")
    with pytest.raises(ValueError, match=r"train.py:a is a function and 'python b.py' is a command"):
        kind_of(["train.py:a", "python b.py"])
    with pytest.raises(ValueError, match=r"train.py:a-b: after the colon is no name of a function"):
        kind_of(["train.py:a-b", "train.py:c-d"])


def test_names_are_short_and_unique():
    assert names_of(["t.py:a", "t.py:b"]) == {"a": "t.py:a", "b": "t.py:b"}
    assert names_of(["t.py:a", "u.py:a"]) == {"t.py:a": "t.py:a", "u.py:a": "u.py:a"}
    assert names_of(["t.py:a", "t.py:a", "t.py:a"]) == {"a": "t.py:a", "a (2)": "t.py:a", "a (3)": "t.py:a"}
    assert list(names_of(["true", "true"])) == ["true", "true (2)"]


@given(st.lists(st.sampled_from(["t.py:a", "t.py:b", "u.py:a", "u.py:b"]), min_size=2, max_size=6))
def test_every_variant_keeps_its_function(texts):
    assert sorted(names_of(texts).values()) == sorted(texts)


@given(st.dictionaries(st.text(min_size=1), st.text(), min_size=1), st.none() | st.floats(0, 1), st.floats(0.01, 10))
def test_a_specification_survives_being_written(variants, tolerance, seconds):
    specification = Specification("commands", variants, "", tolerance, seconds)
    assert Specification.of_text(specification.as_text()) == specification
