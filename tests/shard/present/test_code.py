"""The code of a plan needs no penstock, and compiles to the program of `plan.jit`, but for names."""

import ast
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tests.extras import require
from tests.shard import steps
from tests.shard.assertions import assert_close
from tests.shard.eager import MESHES, planned
from tests.shard.example import plan_of
from tests.shard.steps import array, mlp, mlp_step, rows, sgd

import penstock as ps
from penstock.shard.apply.sharding_constraints import ShardingConstraints

MESH = MESHES[1]
_NAME = re.compile(r"%[\w.-]+|HloModule \S+|entry_computation_name=\S+|(?:calls|to_apply)=[\w.-]+")
_UNNAMED = re.compile(
    r", metadata=\{[^}]*\}|[\w.-]+: (?=[a-z]+\d*\[|\()|^(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d.*\n)*",
    re.MULTILINE,
)


def program(lowered):
    """Return the compiled program of a lowered step, with its names numbered and without the lines of its source."""
    names = {}
    text = _UNNAMED.sub("", lowered.compile().as_text())
    return _NAME.sub(lambda name: names.setdefault(name[0], f"%{len(names)}"), text)


def run_code(plan):
    """Run the code of a plan, and return the names that it defines."""
    code, module = plan.code(), {"__name__": "layout"}
    assert not any(name.startswith("penstock") for name in imported(code))
    exec(compile(code, "layout.py", "exec"), module)
    return module


def imported(code):
    nodes = list(ast.walk(ast.parse(code)))
    names = [each.name for node in nodes if isinstance(node, ast.Import) for each in node.names]
    return names + [node.module for node in nodes if isinstance(node, ast.ImportFrom)]


def assert_same(plan, step, *args, donate_argnums=()):
    module = run_code(plan)
    printed = module["jit_step"](step, *args, donate_argnums=donate_argnums)
    assert program(printed.lower(*args)) == program(plan.jit(step, donate_argnums=donate_argnums).lower(*args))
    return module


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def layer(hidden, weights):
    queries, keys, values = (
        (hidden @ weights[name]).reshape(*hidden.shape[:2], 2, hidden.shape[2] // 2) for name in ("q", "k", "v")
    )
    scores = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", queries, keys))
    hidden = hidden + jnp.einsum("bhts,bshd->bthd", scores, values).reshape(hidden.shape) @ weights["o"]
    return hidden + jax.nn.gelu(hidden @ weights["up"]) @ weights["down"], None


def transformer_step(state, batch):
    """Update a transformer, whose layers are scanned and computed again, with decoupled weight decay."""

    def loss(params):
        hidden, _ = lax.scan(jax.checkpoint(layer), params["embed"][batch["tokens"]], params["layers"])
        scores = jax.nn.log_softmax(hidden @ params["embed"].T)
        return -jnp.mean(jnp.take_along_axis(scores, batch["targets"][..., None], -1))

    value, gradients = jax.value_and_grad(loss)(state["params"])
    count = state["count"] + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], gradients)
    square = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["square"], gradients)

    def update(p, m, v):
        return p - 1e-3 * (m / (1 - 0.9**count) / (jnp.sqrt(v / (1 - 0.99**count)) + 1e-8) + 0.1 * p)

    params = jax.tree.map(update, state["params"], mean, square)
    return {"params": params, "mean": mean, "square": square, "count": count}, value


def transformer(width=32, layers=3, vocabulary=64):
    square = array(layers, width, width, seed=1)
    weights = dict.fromkeys("qkvo", square) | {"up": array(layers, width, 64, seed=2), "down": array(layers, 64, width)}
    params = {"embed": array(vocabulary, width, seed=3), "layers": weights}
    zeros = jax.tree.map(jnp.zeros_like, params)
    tokens = jnp.arange(16 * 8).reshape(16, 8) % vocabulary
    return {"params": params, "mean": zeros, "square": zeros, "count": jnp.int32(0)}, {"tokens": tokens, "targets": tokens}


def test_a_scanned_transformer_is_the_same_program_with_the_same_results():
    args = transformer()
    plan = planned(transformer_step, *args, mesh=MESH)
    module = assert_same(plan, transformer_step, *args, donate_argnums=0)
    printed = module["jit_step"](transformer_step, *args)
    results = printed(*jax.device_put(args, module["in_shardings"](module["make_mesh"](), *args)))
    assert_close(results, plan.jit(transformer_step)(*args))
    assert jax.tree.map(lambda leaf: leaf.sharding, results) == plan.out_shardings


@pytest.mark.parametrize("name", ["odd_state", "choices", "while_loop"])
def test_steps_of_other_forms_are_the_same_program(name):
    step, state, batch = getattr(steps, name)()
    assert_same(planned(step, *state, batch, mesh=MESH), step, *state, batch)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=len)
@pytest.mark.parametrize(
    "name",
    [
        "attention",
        "custom_derivatives",
        "experts",
        "fori_loop",
        "in_parts",
        "nested_jit",
        "random_keys",
        "scan_that_collects",
        "scanned_layers",
        "tied_embeddings",
    ],
)
def test_more_steps_are_the_same_program_on_all_meshes(name, mesh):
    step, state, batch = getattr(steps, name)()
    assert_same(planned(step, *state, batch, mesh=mesh), step, *state, batch)


def test_without_its_constraints_the_code_is_another_program():
    plan = planned(mlp_step, mlp(), rows(), mesh=MESH)
    bare = replace(plan, sharding_constraints=ShardingConstraints())
    assert "CONSTRAINTS" not in bare.code()
    assert "Evaluation" not in bare.code()
    printed = run_code(bare)["jit_step"](mlp_step, mlp(), rows())
    assert program(printed.lower(mlp(), rows())) != program(plan.jit(mlp_step).lower(mlp(), rows()))


def test_sums_that_a_plan_merges_are_constrained_around_all_of_them():
    def step(params, batch):
        def loss(params):
            return jax.vmap(lambda row: jnp.mean((jnp.tanh(row @ params["w"] + params["b"]) @ params["o"]) ** 2))(batch).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        return sgd(params, gradients), value

    args = {"w": shape(16, 32), "b": shape(32), "o": shape(32, 16)}, shape(16, 4, 16)
    plan = planned(step, *args, mesh=MESH)
    assert len(plan.traced.unmerged.jaxpr.eqns) > len(plan.traced.closed.jaxpr.eqns)
    assert_same(plan, step, *args)


def test_high_level_primitives_and_linear_solves_are_entered():
    def step(params, batch):
        def loss(params):
            rows = jnp.searchsorted(params["edges"], batch[:, 0])
            solved, _ = jax.scipy.sparse.linalg.cg(lambda v: params["w"].T @ (params["w"] @ v) + v, batch.T @ jnp.ones(16))
            return jnp.mean((jnp.tanh(batch @ params["w"]) * params["table"][rows]) ** 2) + jnp.mean((batch @ solved) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return sgd(params, gradients), value

    args = {"edges": shape(32), "w": shape(16, 16), "table": shape(33, 16)}, shape(16, 16)
    plan = planned(step, *args, mesh=MESH)
    assert "left out" not in plan.code()
    assert_same(plan, step, *args)


def test_arguments_by_keyword_come_last():
    def step(params, x, *, mask):
        value, gradient = jax.value_and_grad(lambda params: jnp.mean(mask * (x @ params) ** 2))(params)
        return params - 0.1 * gradient, value

    params, x, mask = array(16, 16), array(16, 16, seed=1), array(16, 16, seed=2)
    plan = planned(step, params, x, mask=mask, mesh=MESH)
    printed = run_code(plan)["jit_step"](step, params, x, mask)
    assert_close(printed(params, x, mask), plan.jit(step)(params, x, mask=mask))
    assert program(printed.lower(params, x, mask)) == program(plan.jit(step).lower(params, x, mask=mask))


def test_a_plan_that_is_left_to_the_compiler_has_the_layouts_at_the_start():
    plan = planned(mlp_step, mlp(), rows(), mesh=MESH)
    at_start = tuple(leaf.used if leaf.role == "parameters" else None for leaf in plan.inputs)
    left = replace(plan, sharding_constraints=ShardingConstraints(at_start=at_start))
    assert left.left_to_compiler
    assert "AT_START = [" in left.code()
    assert_same(left, mlp_step, mlp(), rows())


def test_layouts_that_are_made_again_are_made_again_by_the_printed_code():
    plan = planned(mlp_step, mlp(), rows(), mesh=MESH)
    chains = plan.sharding_constraints.operands.items()
    again = {path: tuple(each and (each[0], *each) for each in operands) for path, operands in chains}
    constraints = replace(plan.sharding_constraints, operands=again)
    assert any(len(each) > 2 for operands in again.values() for each in operands if each)
    assert_same(replace(plan, sharding_constraints=constraints), mlp_step, mlp(), rows())


def test_given_devices_keep_their_order():
    devices = np.array(jax.devices()[::-1]).reshape(2, 4)
    plan = planned(mlp_step, mlp(), rows(), mesh=Mesh(devices, ("a", "b")))
    module = assert_same(plan, mlp_step, mlp(), rows())
    assert module["make_mesh"]() == plan.mesh
    fewer = planned(mlp_step, mlp(), rows(), devices=4)
    assert run_code(fewer)["make_mesh"]() == fewer.mesh


def test_what_is_written_for_explicit_axes_works():
    plan = plan_of(mlp_step, mlp(), rows())
    module, args = run_code(plan), (mlp(), rows())
    explicit = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(explicit):
        given = jax.device_put(args, NamedSharding(explicit, P()))
        with jax.set_mesh(module["make_mesh"]()):
            train = module["jit_step"](mlp_step, *args)
            results = train(*jax.device_put(given, module["in_shardings"](module["make_mesh"](), *given)))
    assert_close(results, plan.jit(mlp_step)(*args))


Moments = namedtuple("Moments", ["count", "mean"])


def test_paths_that_differ_in_numbers_share_a_row_if_they_share_a_layout():
    def step(state, batch):
        def loss(layers):
            hidden = batch["x's"]
            for each in layers:
                hidden = jnp.tanh(hidden @ each["w"])
            return jnp.mean(hidden**2)

        value, gradients = jax.value_and_grad(loss)(state[0])
        return (sgd(state[0], gradients), Moments(state[1].count + 1, gradients)), value

    layers = [{"w": array(16, 16)} for _ in range(12)]
    args = (layers, Moments(jnp.int32(0), layers)), {"x's": array(16, 16), "y*": array(16)}
    plan = planned(step, *args, mesh=MESH, constraints={"state/0/*": P("data", "model"), "state/1/mean/[02]/*": P("model")})
    module = assert_same(plan, step, *args)
    table = module["ARGUMENTS"][0]
    assert table["[*][*]['w']"] == P("data", "model")
    assert table["[1].mean[2]['w']"] == P("model", None)
    assert "[1].mean[*]['w']" not in table
    assert module["in_shardings"](plan.mesh, *args) == plan.shardings
    assert module["shard_like"](jax.eval_shape(step, *args), module["RESULTS"], plan.mesh) == plan.out_shardings


def test_another_path_is_an_error_that_names_it():
    module = run_code(plan_of(mlp_step, mlp(), rows()))
    with pytest.raises(KeyError, match=r"no leaf at \['z'\]; it has \['x'\], \['y'\]"):
        module["jit_step"](mlp_step, mlp(), {**rows(), "z": array(4)})


def test_a_step_without_the_operations_of_the_plan_is_an_error():
    module = run_code(planned(mlp_step, mlp(), rows(), mesh=MESH))

    def other(params, batch):
        return jax.tree.map(jnp.sin, params), jnp.sum(batch["x"] @ params["in"])

    with pytest.raises(ValueError, match=r"the step has 1 × dot_general .*, and the plan is for 2"):
        module["jit_step"](other, mlp(), rows()).lower(mlp(), rows())


def test_comments_have_the_lines_of_the_step_and_the_code_does_not_depend_on_them():
    code = planned(mlp_step, mlp(), rows(), mesh=MESH).code()
    comment = r'# steps.py:\d+ \(mlp_loss\): hidden = jax.nn.relu\(batch\["x"\] @ params\["in"\] \+ params\["bias"\]\)'
    assert re.search(comment, code)
    assert "steps.py" not in ast.unparse(ast.parse(code))


def test_names_from_outside_cannot_change_the_code():
    hostile = 'a"""\n\'); import os #\\ {0: 1, 2: 3}'

    def step(params, batch):
        return {hostile: params[hostile] - (batch.T @ (batch @ params[hostile]))}, 0.0

    args = {hostile: array(16, 16)}, array(16, 16)
    mesh = {"x, 1: {'": 2, hostile: 4}
    plan = planned(step, *args, mesh=mesh, constraints={"params/*": P(hostile)})
    plan = replace(plan, hardware=hostile)
    module = run_code(plan)
    assert "os" not in module
    assert module["make_mesh"]() == plan.mesh
    assert module["in_shardings"](plan.mesh, *args) == plan.shardings
    assert module["CONSTRAINTS"]


def test_the_code_is_clean_and_formatted():
    if shutil.which("ruff") is None:
        pytest.skip("needs ruff: pip install penstock[test-all]")
    code = planned(transformer_step, *transformer(), mesh=MESHES[2]).code()
    for ruff in (["check"], ["format", "--check", "--line-length=130"]):
        checked = subprocess.run(["ruff", *ruff, "--isolated", "-"], input=code, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout


def test_a_loaded_plan_is_bound_first(tmp_path):
    plan = plan_of(mlp_step, mlp(), rows())
    plan.save(tmp_path / "plan.json")
    loaded = ps.Plan.load(tmp_path / "plan.json")
    with pytest.raises(ValueError, match=r"plan\.bind\(step, \*args\) first"):
        loaded.code()
    assert loaded.bind(mlp_step, mlp(), rows()).code() == plan.code()


def test_flax_nnx_objects_are_refused():
    nnx = require("flax.nnx")

    def step(model, batch):
        gradients = nnx.grad(lambda model: jnp.mean(model(batch) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model), nnx.state(gradients)))

    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"takes Flax NNX objects.*nnx\.split.*nnx\.merge"):
        planned(step, model, array(16, 16), mesh=MESH).code()


def test_equinox_modules_are_partitioned():
    eqx = require("equinox")

    def step(module, batch):
        gradients = eqx.filter_grad(lambda module: jnp.mean(jax.vmap(module)(batch) ** 2))(module)
        return eqx.apply_updates(module, jax.tree.map(lambda g: -0.1 * g, gradients))

    module, batch = eqx.nn.MLP(16, 16, 32, depth=1, key=jax.random.key(0)), array(16, 16)
    plan = planned(step, module, batch, mesh=MESH)
    assert "eqx.partition" in plan.code()
    arrays, static = eqx.partition(module, eqx.is_array)

    def of_arrays(arrays, batch):
        return eqx.filter(step(eqx.combine(arrays, static), batch), eqx.is_array)

    printed = run_code(plan)["jit_step"](of_arrays, arrays, batch)
    assert_close(printed(arrays, batch), eqx.filter(plan.jit(step)(module, batch), eqx.is_array))


def test_the_code_runs_where_penstock_is_not(tmp_path):
    (tmp_path / "layout.py").write_text(planned(_square_step, shape(16, 16), shape(16, 16), mesh=MESH).code())
    script = (
        "import sys\nsys.modules['penstock'] = None\nimport jax\njax.config.update('jax_num_cpu_devices', 8)\nimport layout\n"
        "w = jax.numpy.ones((16, 16))\n"
        "new, _ = layout.jit_step(lambda w, x: (w - 0.1 * (x.T @ (x @ w)), 0.0), w, w)(w, w)\nprint(new.sharding.spec, new[0, 0])"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "-24.6" in run.stdout


def _square_step(w, x):
    return w - 0.1 * (x.T @ (x @ w)), 0.0
