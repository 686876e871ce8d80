"""Flax NNX modules that a step writes to are state: they are planned, placed, trained and donated, or refused with a reason."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from tests.shard.assertions import assert_close, assert_laid_out
from tests.shard.eager import MESHES, planned
from tests.shard.steps import rows

import penstock as ps

CONSTRAINTS = {"batch/*": P("data"), "model/up/kernel": P(None, "model")}


class Model(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)
        self.activation = jax.nn.relu

    def __call__(self, x):
        return self.down(self.activation(self.drop(self.norm(self.up(x)))))


class Tied(nnx.Module):
    """A model with one kernel in two places, and one `nnx.Rngs` in two."""

    def __init__(self, rngs):
        self.one, self.other = nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)
        self.other.kernel = self.one.kernel
        self.rngs = self.one.rngs = rngs

    def __call__(self, x):
        noise = jax.random.normal(self.rngs(), x.shape) + jax.random.normal(self.one.rngs(), x.shape)
        return self.other(jnp.tanh(self.one(x))) + 0.01 * noise


def train_step(model, optimizer, batch):
    def loss(model):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def made(kind=Model):
    model = kind(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(0.05, momentum=0.9), wrt=nnx.Param)


def losses(step, model, optimizer, batch, steps=3):
    return [float(step(model, optimizer, batch)) for _ in range(steps)]


def variables(module):
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf,
                        nnx.to_pure_dict(nnx.state(module)))  # fmt: skip


@pytest.mark.parametrize("wrap", [lambda step: step, nnx.jit, jax.jit], ids=["plain", "nnx.jit", "jax.jit"])
@pytest.mark.parametrize("kind", [Model, Tied])
def test_a_step_that_writes_to_modules_trains(wrap, kind):
    expected, optimizer = made(kind)
    curve = losses(nnx.jit(train_step), expected, optimizer, rows())
    model, optimizer = made(kind)
    step = wrap(train_step)
    plan = planned(step, model, optimizer, rows(), mesh=MESHES[1], constraints={"batch/*": P("data")})
    assert losses(plan.jit(step), model, optimizer, rows()) == pytest.approx(curve, rel=1e-4)
    assert curve[-1] < curve[0]
    assert_close(variables(model), variables(expected), 1e-3)


def test_modules_are_state_with_plain_paths():
    plan = planned(train_step, *made(), rows(), mesh=MESHES[1], constraints=CONSTRAINTS)
    roles = {leaf.path: leaf.role for leaf in plan.inputs}
    assert roles["model/up/kernel"] == "parameters"
    assert roles["optimizer/opt_state/0/trace/up/kernel"] == "optimizer"
    assert {path for path, role in roles.items() if role == "batch"} == {"batch/x", "batch/y"}
    assert set(plan.state.values()) == {number for number, leaf in enumerate(plan.inputs) if not leaf.path.startswith("batch")}
    assert plan.batch_shardings == plan.shardings[2]


def test_a_model_and_its_optimizer_are_created_at_once():
    plan = planned(train_step, *nnx.eval_shape(made), rows(), mesh=MESHES[1], constraints=CONSTRAINTS)
    expected = made()
    for state in (plan.init(made), plan.put(made())):
        assert_laid_out(nnx.state(state), nnx.state(plan.shardings[:2]))
        assert_close(variables(state[0]), variables(expected[0]))
        assert losses(plan.jit(train_step, donate_argnums=(0, 1)), *state, rows()) == pytest.approx(
            losses(train_step, *made(), rows()), rel=1e-4
        )


def test_variables_of_two_arguments_that_are_created_at_once_stay_one():
    def create():
        rngs = nnx.Rngs(0)
        return Model(rngs), rngs

    def step(model, rngs, batch):
        return model(batch["x"] + jax.random.normal(rngs(), batch["x"].shape)).mean()

    plan = planned(step, *nnx.eval_shape(create), rows(), mesh=MESHES[1])
    for model, rngs in (plan.init(create), plan.put(create())):
        alone = create()
        for _ in range(2):
            assert_close(plan.jit(step)(model, rngs, rows()), step(*alone, rows()), 1e-4)
        assert_close(variables(rngs), variables(alone[1]))


def test_a_step_may_return_modules_whose_functions_are_not_those_of_the_plan():
    def step(model, optimizer, batch):
        return model, optimizer, train_step(model, optimizer, batch)

    plan = planned(step, *nnx.eval_shape(made), rows(), mesh=MESHES[1])
    state, alone = plan.init(made), made()  # optax makes other functions
    train = plan.jit(step, donate_argnums=(0, 1))
    for _ in range(3):
        *state, loss = train(*state, rows())
        assert_close(loss, train_step(*alone, rows()), 1e-4)


def test_modules_are_created_put_fed_and_donated():
    batch = jax.tree.map(np.asarray, rows())
    abstract = nnx.eval_shape(made)
    plan = planned(train_step, *abstract, batch, mesh=MESHES[1], constraints=CONSTRAINTS)
    original, optimizer = made()
    created, model, optimizer = plan.init(lambda: made()[0]), plan.put(original), plan.put(optimizer)
    assert_laid_out(nnx.state(created), nnx.state(plan.shardings[0]))
    assert_laid_out(nnx.state(model), nnx.state(plan.shardings[0]))
    assert_close(variables(created), variables(original))
    train = plan.jit(train_step, donate_argnums=(0, 1))
    old = jax.tree.leaves((model, optimizer))
    with ps.feed([batch] * 3, to=plan) as batches:
        curve = [float(train(model, optimizer, each)) for each in batches]
    assert all(leaf.is_deleted() for leaf in old)
    assert_laid_out(nnx.state(model), nnx.state(plan.shardings[0]))
    assert_laid_out(nnx.state(optimizer), nnx.state(plan.shardings[1]))
    assert curve == pytest.approx(losses(train_step, *made(), batch), rel=1e-4)
    assert not jax.tree.leaves(original)[0].is_deleted()
    assert plan.verify().measured.memory > 0


def test_tied_variables_stay_tied():
    plan = planned(train_step, *made(Tied), rows(), mesh=MESHES[1], constraints={"batch/*": P("data")})
    for model in (plan.init(lambda: made(Tied)[0]), plan.put(made(Tied)[0])):
        assert model.one.kernel is model.other.kernel
    assert sum(leaf.path.endswith("kernel") and leaf.path.startswith("model") for leaf in plan.inputs) == 1


def test_an_optimizer_that_holds_the_model_trains_it():
    def step(both, batch):
        def loss(model):
            return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

        value, gradients = nnx.value_and_grad(loss)(both["model"])
        both["optimizer"].update(both["model"], gradients)
        return value

    model, optimizer = made()
    curve = losses(train_step, *made(), rows())
    optimizer.model = model
    plan = planned(step, {"model": model, "optimizer": optimizer}, rows(), mesh=MESHES[1])
    train = plan.jit(step)
    assert [float(train({"model": model, "optimizer": optimizer}, rows())) for _ in range(3)] == pytest.approx(curve, rel=1e-4)
    assert optimizer.model is model


def test_modules_that_a_step_writes_to_and_returns_are_results_once():
    def step(state, batch):
        value = train_step(*state, batch)
        return state, value

    state, batch = made(), rows()
    plan = ps.plan(step, state, batch, mesh=MESHES[1], hardware="tpu-v5e", check=False)
    leaves = len(jax.tree.leaves(state))
    assert len(plan.outputs) == leaves + 1
    assert sorted(plan.state.values()) == list(range(leaves))
    assert {leaf.role for leaf in plan.inputs if "opt_state" in leaf.path and leaf.shape} == {"optimizer"}
    state, alone = plan.put(state), made()
    train = plan.jit(step, donate_argnums=0)
    for _ in range(3):
        returned, loss = train(state, batch)
        expected = train_step(*alone, batch)
        assert_close(loss, expected, 1e-3)
        assert_close(variables(state[0]), variables(alone[0]), 1e-3)  # the argument has the new values, as without a plan
        assert_close(variables(returned[0]), variables(alone[0]), 1e-3)


def test_results_beside_the_state_come_back():
    def step(model, optimizer, batch):
        return {"loss": train_step(model, optimizer, batch), "norm": jnp.sum(model.up.kernel[...] ** 2)}

    plan = planned(step, *made(), rows(), mesh=MESHES[1])
    assert_close(plan.jit(step)(*made(), rows()), step(*made(), rows()), 1e-4)
    assert jax.tree.structure(plan.out_shardings) == jax.tree.structure({"loss": 0, "norm": 0})


def test_a_module_that_is_only_read_is_no_state():
    def evaluate(model, batch):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    model = made()[0]
    model.eval()
    for step in (evaluate, nnx.jit(evaluate)):
        plan = planned(step, model, rows(), mesh=MESHES[1], constraints={"batch/*": P("data")})
        assert plan.state == {}
        assert_close(plan.jit(step)(model, rows()), evaluate(model, rows()))


def test_a_saved_plan_trains_modules(tmp_path):
    planned(train_step, *made(), rows(), mesh=MESHES[1], constraints=CONSTRAINTS).save(tmp_path / "plan.json")
    loaded = ps.Plan.load(tmp_path / "plan.json")
    curve = losses(train_step, *made(), rows())
    for plan in (loaded, loaded.bind(train_step, *made(), rows())):
        model, optimizer = map(plan.put, made())
        assert losses(plan.jit(train_step), model, optimizer, rows()) == pytest.approx(curve, rel=1e-4)


@pytest.mark.parametrize("wrap", [lambda step: step, nnx.jit, jax.jit], ids=["plain", "nnx.jit", "jax.jit"])
def test_modules_that_a_step_closes_over_and_writes_to_are_named(wrap):
    model, optimizer = made()

    def step(batch):
        return train_step(model, optimizer, batch)

    def counts(batch):
        model.norm.mean[...] = batch["x"].mean()
        return batch["x"].sum()

    with pytest.raises(ValueError, match=r"^the step .* 'model' and 'optimizer', .* ps.plan\(step, model, optimizer, "):
        planned(wrap(step), rows(), mesh=MESHES[0])
    with pytest.raises(ValueError, match=r"'model', which it closes over\. .* nnx\.split") as caught:
        planned(wrap(counts), rows(), mesh=MESHES[0])
    assert len(str(caught.value)) < 600


class Trainer:
    def __init__(self):
        self.model, self.optimizer = made()

    def step(self, batch):
        return train_step(self.model, self.optimizer, batch)


@pytest.mark.parametrize(
    ("step", "names"),
    [
        (functools.partial(train_step, *made()), "'model' and 'optimizer'"),
        (Trainer().step, "'self.model' and 'self.optimizer'"),
    ],
    ids=["partial", "method"],
)
def test_modules_that_are_bound_to_a_step_are_named(step, names):
    with pytest.raises(ValueError, match=f"changes or differentiates {names}, which it closes over"):
        planned(step, rows(), mesh=MESHES[0])


def test_modules_of_a_function_that_the_step_closes_over_are_named():
    model, optimizer = made()
    inner = nnx.jit(lambda batch: train_step(model, optimizer, batch))

    def step(batch, times=2):
        return inner(batch) + (step(batch, times - 1) if times > 1 else 0.0)  # it closes over itself

    with pytest.raises(ValueError, match="changes or differentiates 'model' and 'optimizer', which it closes over"):
        planned(step, rows(), mesh=MESHES[0])


@pytest.mark.parametrize("mode", ["hijax", "ref"])
def test_variables_that_are_mutable_arrays_are_refused(mode):
    with nnx.var_defaults(**{mode: True}):
        model, optimizer = made()
    with pytest.raises(ValueError, match=rf"'model' has variables with {mode}=True, .* nnx\.vars_as\(model, hijax=False, ref="):
        planned(train_step, model, optimizer, rows(), mesh=MESHES[0])


def test_changes_that_a_plan_cannot_follow_are_named():
    def grows(model, batch):
        model.mean = nnx.Variable(batch["x"].mean())
        return batch["x"].sum()

    def replaces(model, batch):
        model.count = model.count + 1
        return batch["x"].sum()

    model = made()[0]
    with pytest.raises(ValueError, match=r"changes the structure of the Flax NNX object 'model'"):
        planned(grows, model, rows(), mesh=MESHES[0])
    model.count = nnx.data(jnp.zeros(()))
    with pytest.raises(ValueError, match=r"array of the Flax NNX object 'model' that is not in an nnx\.Variable"):
        planned(replaces, model, rows(), mesh=MESHES[0])


def test_a_copy_of_a_module_that_is_changed_in_its_place_is_warned_of():
    def step(model, optimizer, batch):
        return train_step(nnx.clone(model), optimizer, batch)

    with pytest.warns(UserWarning, match=r"a new value of 'model/down/bias' and 5 more .* not a copy that nnx\.clone"):
        planned(step, *made(), rows(), mesh=MESHES[0])
