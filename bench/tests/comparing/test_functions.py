"""A user's function: its import, its arguments, donation, and what it returns."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock_bench.comparing.functions import Call, as_arrays, live, load_function, outputs
from penstock_bench.comparing.workload import _ROUNDING
from penstock_bench.model import VerificationError
from penstock_bench.parity import relative_differences

USER = """
from functools import partial
import jax, jax.numpy as jnp
import neighbour

def inputs():
    return [jnp.ones(3)], jnp.ones(3)

def only():
    return {"x": jnp.arange(4.0)}

def step(state, x):
    return [state[0] - 0.1 * x], (x * state[0]).sum()

donating = jax.jit(step, donate_argnums=0)
donating_state_alone = jax.jit(lambda state, x: step(state, x)[0], donate_argnums=0)
donating_batch = jax.jit(lambda state, x: (step(state, x)[0], x + 1), donate_argnums=(0, 1))
losing = jax.jit(lambda state, x: (x.sum(), step(state, x)[0]), donate_argnums=0)
not_a_function = 3

def doubled(tree):
    return neighbour.double(tree["x"])

def without():
    return 7
"""


@pytest.fixture
def user(tmp_path, monkeypatch) -> str:
    """The path of a user's file."""
    name = f"user_{tmp_path.name}".replace("-", "_")
    (tmp_path / "neighbour.py").write_text("def double(x):\n    return 2 * x\n")
    path = tmp_path / f"{name}.py"
    path.write_text(USER)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for module in (name, "neighbour"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    yield str(path)
    for module in (name, "neighbour"):
        sys.modules.pop(module, None)


def test_a_function_is_imported_with_its_neighbours_and_gets_its_arguments(user):
    (loss,) = [Call(f"{user}:step", f"{user}:inputs")()[1]]
    assert loss == 3
    assert Call(f"{user}:doubled", f"{user}:only")().tolist() == [0, 2, 4, 6]
    assert Call(f"{user}:without", "")() == 7


@pytest.mark.parametrize(("name", "says"), [("absent", "has no function absent"), ("not_a_function", "is not a function")])
def test_what_is_no_function_is_named(user, name, says):
    with pytest.raises(ValueError, match=says):
        load_function(f"{user}:{name}")


def test_a_file_that_is_not_there_or_hides_behind_a_module_is_named(tmp_path):
    with pytest.raises(ValueError, match="is not a file"):
        load_function(f"{tmp_path}/no.py:f")
    (tmp_path / "json.py").write_text("def f(): pass\n")
    with pytest.raises(ValueError, match="the module 'json' is json of another place; rename the file"):
        load_function(f"{tmp_path}/json.py:f")


@pytest.mark.parametrize("name", ["donating", "donating_state_alone"])
def test_a_state_that_was_donated_is_followed_by_the_result(user, name):
    call = Call(f"{user}:{name}", f"{user}:inputs")
    for expected in (0.9, 0.8, 0.7):
        result = call()
        state = result[0] if isinstance(result, tuple) else result
        np.testing.assert_allclose(state[0], expected, rtol=1e-6)


def test_a_function_without_donation_gets_the_same_arguments_each_time(user):
    call = Call(f"{user}:step", f"{user}:inputs")
    assert [call()[0][0].tolist() for _ in range(2)] == [[pytest.approx(0.9)] * 3] * 2


@pytest.mark.parametrize(("name", "says"), [("losing", "neither its result"), ("donating_batch", "more than its first argument")])
def test_a_donation_that_cannot_be_followed_is_told(user, name, says):
    with pytest.raises(VerificationError, match=says):
        Call(f"{user}:{name}", f"{user}:inputs")()


def test_a_block_gives_milliseconds_a_call(user):
    with live(f"{user}:step", f"{user}:inputs", None) as ready:
        assert ready.blocks["time"](0.01) > 0


def test_outputs_are_named_by_their_places(user):
    assert set(outputs(f"{user}:step", f"{user}:inputs", None)) == {"output: [0][0]", "output: [1]"}


def differs(ours, theirs) -> float:
    def arrays(value):
        found = {}
        for name, array in as_arrays(value).items():
            from penstock_bench.comparing.functions import _finite_parts

            found |= _finite_parts(f"output: {name}", array)
        return found

    return max(relative_differences(arrays(ours), arrays(theirs), _ROUNDING).values())


@pytest.mark.parametrize(
    "value",
    [
        jnp.array([1.0, math.nan, math.inf, -math.inf]),
        jnp.array([1 + 2j]),
        jnp.ones(3, jnp.bfloat16),
        jax.random.key(3),
        {"a": np.arange(3), "b": [True, 2.5]},
        3,
    ],
    ids=["not finite", "complex", "bfloat16", "key", "tree", "number"],
)
def test_equal_results_of_any_kind_are_equal(value):
    assert differs(value, value) == 0


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (np.array([1.0, math.nan]), np.array([1.0, math.inf])),
        (np.array([1.0, math.nan]), np.array([1.0, 2.0])),
        (np.array([1 + 2j]), np.array([1 - 2j])),
        (np.ones(3), np.ones(4)),
        ({"a": np.ones(3)}, {"b": np.ones(3)}),
        ((np.float32(0.30), 10_000), (np.float32(0.36), 10_000)),
        ((jnp.float32(0.3), jax.random.PRNGKey(7), jnp.ones(9)), (jnp.float32(0.36), jax.random.PRNGKey(7), jnp.ones(9))),
        ((np.ones(3), 5), (np.ones(3), 6)),
    ],
)
def test_different_results_differ(ours, theirs):
    assert differs(ours, theirs) > 0.1


def test_what_is_only_rounding_beside_the_others_is_no_difference():
    """The gradient of a bias that cancels out, for example."""
    others = np.ones(100, np.float32)
    assert differs((others, np.full(3, 2e-9)), (others, np.full(3, 5e-8))) < 1e-3


@pytest.mark.parametrize(
    ("value", "says"), [(None, "it returns nothing"), ("text", "has no numbers"), ({}, "it returns nothing")]
)
def test_a_result_that_cannot_be_compared_is_told(value, says):
    with pytest.raises(VerificationError, match=says):
        as_arrays(value)


def test_the_folder_of_a_user_comes_first(user):
    load_function(f"{user}:step")
    assert sys.path[0] == str(Path(user).parent)
