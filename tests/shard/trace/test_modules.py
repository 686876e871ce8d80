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
from tests.shard.eager import planned
from tests.shard.steps import rows

import penstock as ps

MESH = {"data": 2, "model": 2}
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


class Small(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(x)))


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


def sgd():
    return optax.sgd(0.05, momentum=0.9)


SGD = sgd()  # other functions would be compiled again


def made(kind=Model, updates=SGD):
    model = kind(nnx.Rngs(0))
    return model, nnx.Optimizer(model, updates, wrt=nnx.Param)


def losses(step, model, optimizer, batch, steps=3):
    return [float(step(model, optimizer, batch)) for _ in range(steps)]


train_alone = nnx.jit(train_step)


@pytest.fixture(scope="module")
def curve():
    """Return the losses of three steps on one device."""
    return losses(train_alone, *made(), rows())


@pytest.fixture(scope="module")
def small_curve():
    """Return the same of the small model."""
    return losses(train_alone, *made(Small), rows())


@pytest.fixture(scope="module")
def plan():
    return planned(train_step, *nnx.eval_shape(made), rows(), mesh=MESH, constraints=CONSTRAINTS)


@pytest.fixture(scope="module")
def train(plan):
    return plan.jit(train_step, donate_argnums=(0, 1))


def variables(module):
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf,
                        nnx.to_pure_dict(nnx.state(module)))  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "wrap"),
    [
        pytest.param(Small, nnx.jit, id="nnx.jit"),
        pytest.param(Tied, lambda step: step, id="tied"),
        pytest.param(Model, nnx.jit, id="norm and dropout, nnx.jit", marks=pytest.mark.slow),
        pytest.param(Model, jax.jit, id="norm and dropout, jax.jit", marks=pytest.mark.slow),
        pytest.param(Tied, jax.jit, id="tied, jax.jit", marks=pytest.mark.slow),
    ],
)
def test_a_step_that_writes_to_modules_trains(kind, wrap):
    expected, optimizer = made(kind)
    curve = losses(train_alone, expected, optimizer, rows())
    model, optimizer = made(kind)
    step = wrap(train_step)
    plan = planned(step, model, optimizer, rows(), mesh=MESH, constraints={"batch/*": P("data")})
    assert losses(plan.jit(step), model, optimizer, rows()) == pytest.approx(curve, rel=1e-4)
    assert curve[-1] < curve[0]
    assert_close(variables(model), variables(expected), 1e-3)


def test_modules_are_state_with_plain_paths(plan):
    roles = {leaf.path: leaf.role for leaf in plan.inputs}
    assert roles["model/up/kernel"] == "parameters"
    assert roles["optimizer/opt_state/0/trace/up/kernel"] == "optimizer"
    assert {path for path, role in roles.items() if role == "batch"} == {"batch/x", "batch/y"}
    assert set(plan.state.values()) == {number for number, leaf in enumerate(plan.inputs) if not leaf.path.startswith("batch")}
    assert plan.batch_shardings == plan.shardings[2]


def test_a_model_and_its_optimizer_are_created_at_once(plan, train, curve):
    expected = made()
    for state in (plan.init(made), plan.put(made())):
        assert_laid_out(nnx.state(state), nnx.state(plan.shardings[:2]))
        assert_close(variables(state[0]), variables(expected[0]))
        assert losses(train, *state, plan.put(rows())) == pytest.approx(curve, rel=1e-4)


def test_variables_of_two_arguments_that_are_created_at_once_stay_one():
    def create():
        rngs = nnx.Rngs(0)
        return Tied(rngs), rngs

    def step(model, rngs, batch):
        return model(batch["x"] + jax.random.normal(rngs(), batch["x"].shape)).mean()

    plan = planned(step, *nnx.eval_shape(create), rows(), mesh=MESH)
    train, train_alone = plan.jit(step), nnx.jit(step)
    for model, rngs in (plan.init(create), plan.put(create())):
        alone = create()
        for _ in range(2):
            assert_close(train(model, rngs, rows()), train_alone(*alone, rows()), 1e-4)
        assert_close(variables(rngs), variables(alone[1]))


def test_a_step_may_return_modules_whose_functions_are_not_those_of_the_plan(small_curve):
    def step(model, optimizer, batch):
        return model, optimizer, train_step(model, optimizer, batch)

    plan = planned(step, *nnx.eval_shape(functools.partial(made, Small)), rows(), mesh=MESH)
    state = plan.init(lambda: made(Small, sgd()))  # optax makes other functions
    train = plan.jit(step, donate_argnums=(0, 1))
    for expected in small_curve:
        *state, loss = train(*state, rows())
        assert_close(loss, expected, 1e-4)


def test_modules_are_created_put_fed_and_donated(plan, train, curve):
    original, optimizer = made()
    created, model, optimizer = plan.init(lambda: made()[0]), plan.put(original), plan.put(optimizer)
    assert_laid_out(nnx.state(created), nnx.state(plan.shardings[0]))
    assert_laid_out(nnx.state(model), nnx.state(plan.shardings[0]))
    assert_close(variables(created), variables(original))
    old = jax.tree.leaves((model, optimizer))
    with ps.feed([jax.tree.map(np.asarray, rows())] * 3, to=plan) as batches:
        found = [float(train(model, optimizer, each)) for each in batches]
    assert all(leaf.is_deleted() for leaf in old)
    assert_laid_out(nnx.state(model), nnx.state(plan.shardings[0]))
    assert_laid_out(nnx.state(optimizer), nnx.state(plan.shardings[1]))
    assert found == pytest.approx(curve, rel=1e-4)
    assert not jax.tree.leaves(original)[0].is_deleted()


def test_tied_variables_stay_tied():
    plan = planned(train_step, *made(Tied), rows(), mesh=MESH, constraints={"batch/*": P("data")})
    for model in (plan.init(lambda: made(Tied)[0]), plan.put(made(Tied)[0])):
        assert model.one.kernel is model.other.kernel
    assert sum(leaf.path.endswith("kernel") and leaf.path.startswith("model") for leaf in plan.inputs) == 1


def test_an_optimizer_that_holds_the_model_trains_it(small_curve):
    def step(both, batch):
        def loss(model):
            return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

        value, gradients = nnx.value_and_grad(loss)(both["model"])
        both["optimizer"].update(both["model"], gradients)
        return value

    model, optimizer = made(Small)
    optimizer.model = model
    plan = planned(step, {"model": model, "optimizer": optimizer}, rows(), mesh=MESH)
    both, train = {"model": model, "optimizer": optimizer}, plan.jit(step)
    assert [float(train(both, rows())) for _ in range(3)] == pytest.approx(small_curve, rel=1e-4)
    assert optimizer.model is model


def test_modules_that_a_step_writes_to_and_returns_are_results_once():
    def step(state, batch):
        value = train_step(*state, batch)
        return state, value

    state, batch = made(Small), rows()
    plan = ps.plan(step, state, batch, mesh=MESH, hardware="tpu-v5e", check=False)
    leaves = len(jax.tree.leaves(state))
    assert len(plan.outputs) == leaves + 1
    assert sorted(plan.state.values()) == list(range(leaves))
    assert {leaf.role for leaf in plan.inputs if "opt_state" in leaf.path and leaf.shape} == {"optimizer"}
    state, alone = plan.put(state), made(Small)
    train = plan.jit(step, donate_argnums=0)
    for _ in range(3):
        returned, loss = train(state, batch)
        expected = train_alone(*alone, batch)
        assert_close(loss, expected, 1e-3)
        assert_close(variables(state[0]), variables(alone[0]), 1e-3)  # the argument has the new values, as without a plan
        assert_close(variables(returned[0]), variables(alone[0]), 1e-3)


def test_results_beside_the_state_come_back(small_curve):
    def step(model, optimizer, batch):
        return {"loss": train_step(model, optimizer, batch), "norm": jnp.sum(model.up.kernel[...] ** 2)}

    model, optimizer = made(Small)
    plan = planned(step, model, optimizer, rows(), mesh=MESH)
    results = plan.jit(step)(model, optimizer, rows())
    assert_close(results, {"loss": small_curve[0], "norm": jnp.sum(model.up.kernel[...] ** 2)}, 1e-4)
    assert jax.tree.structure(plan.out_shardings) == jax.tree.structure({"loss": 0, "norm": 0})


def test_a_module_that_is_only_read_is_no_state():
    def evaluate(model, batch):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    model = made()[0]
    model.eval()
    for step in (evaluate, nnx.jit(evaluate)):
        plan = planned(step, model, rows(), mesh=MESH, constraints={"batch/*": P("data")})
        assert plan.state == {}
        assert_close(plan.jit(step)(model, rows()), nnx.jit(evaluate)(model, rows()))
    assert plan.verify().measured.memory > 0


def test_a_saved_plan_trains_modules(small_curve, tmp_path):
    plan = planned(train_step, *made(Small), rows(), mesh=MESH, constraints=CONSTRAINTS)
    plan.save(tmp_path / "plan.json")
    loaded = ps.Plan.load(tmp_path / "plan.json")
    model, optimizer = map(loaded.put, made(Small))
    assert losses(loaded.jit(train_step), model, optimizer, rows()) == pytest.approx(small_curve, rel=1e-4)
    bound = loaded.bind(train_step, *made(Small), rows())
    assert jax.tree.leaves(bound.shardings) == jax.tree.leaves(plan.shardings)


@pytest.mark.parametrize("wrap", [lambda step: step, nnx.jit, jax.jit], ids=["plain", "nnx.jit", "jax.jit"])
def test_modules_that_a_step_closes_over_and_writes_to_are_named(wrap):
    model, optimizer = made()

    def step(batch):
        return train_step(model, optimizer, batch)

    def counts(batch):
        model.norm.mean[...] = batch["x"].mean()
        return batch["x"].sum()

    with pytest.raises(ValueError, match=r"^the step .* 'model' and 'optimizer', .* ps.plan\(step, model, optimizer, "):
        planned(wrap(step), rows(), mesh=MESH)
    with pytest.raises(ValueError, match=r"'model', which it closes over\. .* nnx\.split") as caught:
        planned(wrap(counts), rows(), mesh=MESH)
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
        planned(step, rows(), mesh=MESH)


def test_modules_of_a_function_that_the_step_closes_over_are_named():
    model, optimizer = made()
    inner = nnx.jit(lambda batch: train_step(model, optimizer, batch))

    def step(batch, times=2):
        return inner(batch) + (step(batch, times - 1) if times > 1 else 0.0)  # it closes over itself

    with pytest.raises(ValueError, match="changes or differentiates 'model' and 'optimizer', which it closes over"):
        planned(step, rows(), mesh=MESH)


@pytest.mark.parametrize("mode", ["hijax", "ref"])
def test_variables_that_are_mutable_arrays_are_refused(mode):
    with nnx.var_defaults(**{mode: True}):
        model, optimizer = made(Small)
    with pytest.raises(ValueError, match=rf"'model' has variables with {mode}=True, .* nnx\.vars_as\(model, hijax=False, ref="):
        planned(train_step, model, optimizer, rows(), mesh=MESH)


def test_changes_that_a_plan_cannot_follow_are_named():
    def grows(model, batch):
        model.mean = nnx.Variable(batch["x"].mean())
        return batch["x"].sum()

    def replaces(model, batch):
        model.count = model.count + 1
        return batch["x"].sum()

    model = made()[0]
    with pytest.raises(ValueError, match=r"changes the structure of the Flax NNX object 'model'"):
        planned(grows, model, rows(), mesh=MESH)
    model.count = nnx.data(jnp.zeros(()))
    with pytest.raises(ValueError, match=r"array of the Flax NNX object 'model' that is not in an nnx\.Variable"):
        planned(replaces, model, rows(), mesh=MESH)


def test_a_copy_of_a_module_that_is_changed_in_its_place_is_warned_of():
    def step(model, optimizer, batch):
        return train_step(nnx.clone(model), optimizer, batch)

    with pytest.warns(UserWarning, match=r"a new value of 'model/down/bias' and 5 more .* not a copy that nnx\.clone"):
        planned(step, *made(), rows(), mesh=MESH)
