"""A saved plan is loaded equal; a file that is not a plan is refused with the reason."""

import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tests.shard.limits import AT_HAND, COMPILED_HERE
from tests.shard.steps import mlp, mlp_step, odd_state, random_keys, rows, scanned_layers, while_loop

import penstock as ps

MESH = {"data": 2, "model": 4}


def plan_of(step, *args, **options):
    return ps.plan(step, *args, **{"mesh": MESH, "hardware": "tpu-v5e", "check": False, **options})


def forward(w, x):
    return jnp.tanh(x @ w)


@pytest.fixture(scope="module")
def plan():
    return plan_of(mlp_step, mlp(), rows(), constraints={"in": P("model", "data")})


@pytest.fixture
def saved(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    return plan, tmp_path / "plan.json"


@pytest.mark.parametrize("make", [odd_state, scanned_layers, random_keys, while_loop], ids=lambda make: make.__name__)
def test_a_plan_comes_back_equal(make, tmp_path):
    step, state, batch = make()
    plan = plan_of(step, *state, batch)
    plan.save(tmp_path / "plan.json")
    loaded = ps.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert bool(loaded.cost.unknown) == (make is while_loop)
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "plan.json").read_text()


def test_the_compilers_figures_are_saved_too(tmp_path):
    plan = ps.plan(forward, mlp()["in"], rows()["x"], mesh={"data": 2}, hardware=AT_HAND, check=True)
    plan.save(tmp_path / "plan.json")
    assert plan.checked is not None
    assert plan.checked.compiled_for == COMPILED_HERE.replace("8", "2")
    assert plan.checked.seconds_to_compile > 0
    loaded = ps.Plan.load(tmp_path / "plan.json")
    assert loaded.checked == plan.checked
    assert str(loaded) == str(plan)


def test_a_file_is_json_and_nothing_is_left_beside_it(saved):
    _, path = saved
    assert json.loads(path.read_text())["format"] == "penstock plan"
    assert os.listdir(path.parent) == [path.name]


def test_a_loaded_plan_trains_puts_and_creates_state(saved):
    plan, path = saved
    loaded = ps.Plan.load(path)
    state = loaded.put(mlp())
    assert state["in"].sharding.spec == P("model", "data")
    assert loaded.init(mlp)["in"].sharding == state["in"].sharding
    after, loss = loaded.jit(mlp_step, donate_argnums=0)(state, loaded.put(rows()))
    assert after["in"].sharding.is_equivalent_to(plan.shardings[0]["in"], 2)
    np.testing.assert_allclose(loss, jax.jit(mlp_step)(mlp(), rows())[1], 1e-5)


def test_a_loaded_plan_shards_arguments_inside_of_the_jitted_step(saved):
    _, path = saved
    after, loss = ps.Plan.load(path).jit(mlp_step)(mlp(), rows())
    expected, expected_loss = jax.jit(mlp_step)(mlp(), rows())
    np.testing.assert_allclose(loss, expected_loss, 1e-5)
    np.testing.assert_allclose(after["in"], expected["in"], 1e-5, 1e-6)


def test_a_bound_plan_has_its_shardings_again(saved):
    plan, path = saved
    loaded = ps.Plan.load(path)
    with pytest.raises(ValueError, match=r"plan\.bind\(step, \*args\) first"):
        _ = loaded.shardings
    with pytest.raises(ValueError, match=r"plan\.bind\(step, \*args\) first"):
        loaded.verify()
    bound = loaded.bind(mlp_step, mlp(), rows())
    assert bound.shardings == plan.shardings
    assert bound.verify().measured.memory == plan.verify().measured.memory


def test_a_plan_of_another_step_says_what_differs(saved):
    loaded = ps.Plan.load(saved[1])
    with pytest.raises(ValueError, match=r"'params/in' is float32\[16, 32\] in the plan, and float32\[16, 64\] in the step"):
        loaded.bind(mlp_step, mlp(hidden=64), rows())
    with pytest.raises(ValueError, match="the step has the argument 'batch/mask', which the plan has not"):
        loaded.jit(mlp_step)(mlp(), {**rows(), "mask": jnp.ones(16)})
    with pytest.raises(ValueError, match="arguments and results are the same, and the program differs"):
        loaded.bind(lambda params, batch: (params, jnp.sum(batch["x"])), mlp(), rows())


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text[: len(text) // 2], "is not a plan: it is not JSON"),
        (lambda text: "[]", "is not a plan: it lacks format"),
        (lambda text: json.dumps({**json.loads(text), "format": "penstock report"}), "is not a plan: it lacks format"),
        (lambda text: json.dumps({**json.loads(text), "version": 99}), "has version 99 of the format"),
    ],
)
def test_a_file_that_is_no_plan_is_refused_with_the_reason(saved, damage, said):
    path = saved[1]
    path.write_text(damage(path.read_text()))
    with pytest.raises(ValueError, match=said) as raised:
        ps.Plan.load(path)
    assert str(path) in str(raised.value)


def edited(path, edit):
    read = json.loads(path.read_text())
    edit(read)
    path.write_text(json.dumps(read))


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda read: read.update(cost=None), "Expected `object`, got `null` - at `$.cost`"),
        (lambda read: read.pop("mesh"), "Object missing required field `mesh`"),
        (lambda read: read.update(inputs=[{"path": "x"}]), "Object missing required field `shape` - at `$.inputs[0]`"),
        (lambda read: read.update(state=[1]), "Expected `array`, got `int` - at `$.state[0]`"),
        (lambda read: read.update(limit="much"), "Expected `int`, got `str` - at `$.limit`"),
        (lambda read: read["mesh"].update(model=3.5), "Expected `int`, got `float` - at `$.mesh[...]`"),
        (lambda read: read["cost"]["memory"].update(batch="x"), "Expected `int`, got `str` - at `$.cost.memory.batch`"),
        (lambda read: read["results"][0].__setitem__(1, 5), "Expected `array`, got `int` - at `$.results[0][1]`"),
        (lambda read: read.update(platform="abacus"), "it is for the platform 'abacus', and penstock knows tpu, gpu, cpu"),
    ],
)
def test_a_damaged_field_is_named_with_what_it_needs_and_the_remedy(saved, edit, said):
    path = saved[1]
    edited(path, edit)
    with pytest.raises(ValueError, match="^" + re.escape(f"{path} is a damaged plan: {said}; plan again") + "$"):
        ps.Plan.load(path)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda read: read.update(inputs=[]), "result 0 replaces argument 0, of 4 results and 0 arguments"),
        (
            lambda read: read.update(inputs=[], state=[]),
            "leaves of role 'parameters' take .* bytes of a device in its cost, .* take 0",
        ),
        (lambda read: read["inputs"].pop(), "leaves of role 'batch' take"),
        (lambda read: read.update(at_start=[None]), "it has 1 layouts at the start of the step, and 5 arguments"),
        (lambda read: read.update(at_start=[[["rows"]]] * 5), "cannot be brought to"),
        (lambda read: read.update(outputs=[]), "result 0 replaces argument 0, of 0 results"),
        (lambda read: read.update(mesh={}), "a mesh of the axes {}"),
        (lambda read: read["mesh"].update(model=0), "a mesh of the axes"),
        (lambda read: read.update(mesh={"a": 2, "b": 4}), "is for mesh a 2 × b 4, and says what the axes data, model do"),
        (
            lambda read: read.update(mesh={"a": 2, "b": 4}, axis_work={"a": {}, "b": {}}),
            r"'params/in', shape \[16, 32\], cannot be P\('model', 'data'\) on mesh a 2 × b 4",
        ),
        (lambda read: read["mesh"].update(model=3), r"cannot be P\('model', 'data'\) on mesh data 2 × model 3"),
        (lambda read: read["inputs"][1].update(stored=[["model"]]), r"'params/in', shape \[16, 32\], cannot be P\('model'\)"),
        (lambda read: read["inputs"][1].update(stored=[["model"], ["model"]]), r"cannot be P\('model', 'model'\)"),
        (
            lambda read: read["inputs"][1].update(stored=[[], ["model"]]),
            "replaces 'params/in', and they differ in shape or layout",
        ),
        (lambda read: read["inputs"][1].update(slices=3), r"'params/in', shape \[16, 32\], does not have 3 slices"),
        (lambda read: read["inputs"][1].update(slices=0), "does not have 0 slices"),
        (lambda read: read["state"][0].__setitem__(0, 9), "result 9 replaces argument"),
        (
            lambda read: read["results"][0][1].__setitem__(0, [[["x"]]]),
            r"inside of the step it has P\('x'\), and its mesh is data 2",
        ),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(saved, edit, said):
    path = saved[1]
    edited(path, edit)
    with pytest.raises(ValueError, match=f"is a damaged plan: .*(?:{said}).*; plan again"):
        ps.Plan.load(path)


def test_the_layout_in_use_of_a_leaf_divides_its_own_dimensions(tmp_path):
    """Check a weight [2, 2048, 3] that is read as [4096, 3], and whose 4,096 rows are sharded over 8 devices."""

    def step(w, x):
        return jnp.tanh(x @ w.reshape(4096, 3))

    constraints = {"x": P(None, "model")}
    args = (jnp.zeros((2, 2048, 3)), jnp.zeros((1, 4096)))
    plan = ps.plan(step, *args, mesh={"model": 8}, hardware="tpu-v5e", check=False, constraints=constraints)
    plan.save(tmp_path / "plan")
    assert ps.Plan.load(tmp_path / "plan") == plan


def test_a_binary_file_is_no_plan(tmp_path):
    (tmp_path / "plan").write_bytes(b"\x80\x04\x95\xff")
    with pytest.raises(ValueError, match="is not a plan: it is not JSON"):
        ps.Plan.load(tmp_path / "plan")


def test_a_file_that_is_not_there_is_not_found(tmp_path):
    with pytest.raises(FileNotFoundError):
        ps.Plan.load(tmp_path / "plan.json")


_OTHER_PROCESS = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
from tests.shard.steps import random_keys
import penstock as ps
step, state, batch = random_keys()
plan = ps.plan(step, *state, batch, mesh={"data": 2, "model": 4}, hardware="tpu-v5e", check=False)
plan.save(%r)
"""


def test_another_process_makes_the_same_file_and_prints_nothing(tmp_path):
    step, state, batch = random_keys()
    plan_of(step, *state, batch).save(tmp_path / "here.json")
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join([".", *sys.path])}
    command = [sys.executable, "-c", _OTHER_PROCESS % str(tmp_path / "there.json")]
    assert subprocess.run(command, env=environment, check=True, timeout=240, stdout=subprocess.PIPE).stdout == b""
    assert (tmp_path / "there.json").read_text() == (tmp_path / "here.json").read_text()


def test_shapes_alone_make_the_same_file(saved, tmp_path):
    shapes = jax.eval_shape(lambda: (mlp(), rows()))
    plan_of(mlp_step, *shapes, constraints={"in": P("model", "data")}).save(tmp_path / "abstract.json")
    assert (tmp_path / "abstract.json").read_text() == saved[1].read_text()
