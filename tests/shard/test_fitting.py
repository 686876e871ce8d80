"""Plans may run the batch in parts and compute activations again, so that a step fits. The results stay the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.shard.assertions import assert_close
from tests.shard.limits import plan_of
from tests.shard.steps import sgd

import penstock as ps
from penstock.errors import PlanError, SplitError

LAYERS, WIDTH, ROWS = 6, 64, 1024
PARAMS = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), "float32")
X = jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")


def deep_loss(params, x):
    return (jax.lax.scan(lambda x, w: (x + jax.nn.gelu(x @ w), None), x, params)[0] ** 2).mean()


def deep(params, x):
    loss, gradients = jax.value_and_grad(deep_loss)(params, x)
    return sgd(params, gradients), loss


def normalized(params, x):
    loss, gradients = jax.value_and_grad(lambda params, x: deep_loss(params, (x @ params[0]) / (x @ params[0]).std(0)))(params, x)
    return sgd(params, gradients), loss


WHOLE = plan_of(deep, PARAMS, X, check=False).cost.memory.total
TIGHT = WHOLE // 3


def train(step, params, x):
    losses = []
    for _ in range(50):
        params, loss = step(params, x)
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("options", [{"remat": "auto"}, {"microbatches": "auto"}, {"microbatches": 4, "remat": "auto"}])
def test_a_changed_step_fits_and_computes_the_same(options, tmp_path):
    plan = plan_of(deep, PARAMS, X, memory=TIGHT, check=True, **options)
    assert plan.checked.memory <= TIGHT
    rng = np.random.default_rng(0)
    params, x = (rng.normal(0, scale, each.shape).astype("float32") for each, scale in ((PARAMS, 0.1), (X, 1.0)))
    expected = train(jax.jit(deep), params, x)
    assert expected[-1] < 0.9 * expected[0]
    np.testing.assert_allclose(train(plan.jit(deep), plan.put(params), plan.put(x)), expected, rtol=1e-5)
    assert plan.verify(arguments=(params, x)).difference < 1e-6
    plan.save(tmp_path / "plan.json")
    loaded = ps.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert_close(loaded.jit(deep)(loaded.put(params), loaded.put(x)), jax.jit(deep)(params, x))
    with pytest.raises(ValueError, match=r"changes the step.*use plan\.jit"):
        plan.code()


def test_a_plan_says_what_it_changes():
    again = str(plan_of(deep, PARAMS, X, memory=TIGHT, check=False, remat="auto"))
    assert "computed again in the backward pass: float32[1024, 64] made at test_fitting.py:" in again.replace("\n      ", " ")
    plan = plan_of(deep, PARAMS, X, memory=TIGHT, check=False, microbatches=4)
    assert "the batch runs in 4 parts of 256 rows" in str(plan)
    assert plan.rewriting.microbatches == 4


def test_all_decides_for_the_checkpoints_of_a_step_too(tmp_path):
    def checkpointed(params, x):
        layer = jax.checkpoint(lambda x, w: (x + jax.nn.gelu(x @ w), None))
        loss, gradients = jax.value_and_grad(lambda params: (jax.lax.scan(layer, x, params)[0] ** 2).mean())(params)
        return sgd(params, gradients), loss

    kept, free = (plan_of(checkpointed, PARAMS, X, check=False, remat=remat) for remat in ("auto", "all"))
    assert kept.cost != free.cost == plan_of(deep, PARAMS, X, check=False).cost
    rng = np.random.default_rng(0)
    params, x = (rng.normal(0, 0.1, each.shape).astype("float32") for each in (PARAMS, X))
    expected = jax.jit(checkpointed)(params, x)
    free.save(tmp_path / "plan.json")
    for plan in (free, ps.Plan.load(tmp_path / "plan.json").bind(checkpointed, PARAMS, X)):
        assert_close(plan.jit(checkpointed)(plan.put(params), plan.put(x)), expected)


def test_a_step_that_fits_is_left_as_it_is():
    plan = plan_of(deep, PARAMS, X, check=False, remat="auto", microbatches="auto")
    assert plan == plan_of(deep, PARAMS, X, check=False)


def test_what_the_backward_pass_reads_first_is_kept():
    def step(params, x):
        def loss(params):
            hidden, _ = jax.lax.scan(lambda x, w: (x + jax.nn.gelu(x @ w), None), x, params["layers"])
            return jax.nn.logsumexp(hidden @ params["head"], -1).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        return sgd(params, gradients), value

    params = {"layers": PARAMS, "head": jax.ShapeDtypeStruct((WIDTH, 512), "float32")}
    whole = plan_of(step, params, X, check=False)
    plan = plan_of(step, params, X, check=False, memory=int(0.6 * whole.cost.memory.total), remat="auto")
    product = 2 * ROWS * WIDTH * 512 / plan.device_count  # its result is in memory at the peak in any case
    assert plan.rewriting.recomputed
    assert plan.cost.flops - whole.cost.flops < product


def test_a_batch_that_cannot_run_in_parts_stays_whole_with_the_reason():
    with pytest.warns(UserWarning, match="unchecked"):
        plan = plan_of(normalized, PARAMS, X, memory=TIGHT, check=False, microbatches="auto")
    assert plan.rewriting.microbatches == 1
    assert any(each.startswith("the batch stays whole: ") and "test_fitting.py" in each for each in plan.remarks)
    with pytest.raises(SplitError, match=r"depends on a value over all rows, as in batch normalization: test_fitting"):
        plan_of(normalized, PARAMS, X, check=False, microbatches=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"remat": "full"}, "remat='full': None keeps what the step keeps"),
        ({"microbatches": 3}, "microbatches=3: the 1024 rows of the batch do not divide into so many parts"),
        ({"microbatches": 0}, "microbatches=0: a number of parts"),
        ({"microbatches": True}, "microbatches=True: a number of parts"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        plan_of(deep, PARAMS, X, check=False, **options)


def test_a_step_without_gradients_is_refused():
    with pytest.raises(ValueError, match=r"no backward pass was found in this step: call jax\.grad inside of it"):
        plan_of(lambda w, x: jnp.tanh(x @ w[0]), PARAMS, X, check=False, remat="auto")


# The options of a refusal.


def test_a_refusal_has_plans_of_what_would_fit():
    with pytest.raises(PlanError, match=r"By prediction it fits with remat=\"auto\"") as refused:
        plan_of(deep, PARAMS, X, memory=TIGHT)
    options = refused.value.options
    assert next(iter(options)) == 'remat="auto"'
    assert refused.value.needed > TIGHT
    for name, plan in options.items():
        assert name in str(refused.value)
        assert (plan.cost.memory.total if plan.checked is None else plan.checked.memory) <= TIGHT
    again = plan_of(deep, PARAMS, X, memory=TIGHT, remat="auto")
    assert options['remat="auto"'].rewriting == again.rewriting


def test_a_refusal_of_the_arguments_has_only_more_devices():
    with pytest.raises(PlanError, match=r"alone take .* By prediction it fits with devices=\d+: ") as refused:
        plan_of(deep, PARAMS, jax.ShapeDtypeStruct((8, WIDTH), "float32"), memory=4 * LAYERS * WIDTH**2 // 8)
    assert len(refused.value.options) == 1


# The largest batch.


@pytest.mark.parametrize("options", [{}, {"remat": "auto"}])
def test_the_largest_batch_fits_and_a_larger_does_not(options):
    sizes = ps.largest_batch(deep, PARAMS, X, mesh={"data": 8}, hardware="tpu-v5e", memory=TIGHT, check=False, **options)
    largest = sizes.largest
    assert largest.plan.cost.memory.total <= TIGHT
    assert [each.rows for each in sizes.sizes] == sorted(each.rows for each in sizes.sizes)
    assert sizes.refused - largest.rows <= max(8, 0.03 * largest.rows)
    x = jax.ShapeDtypeStruct((sizes.refused, WIDTH), "float32")
    with pytest.warns(UserWarning, match="unchecked"):
        ps.plan(deep, PARAMS, x, mesh={"data": 8}, hardware="tpu-v5e", memory=TIGHT, check=False, **options)
    assert f"{largest.rows:,}" in str(sizes)
    assert largest.rows > (ROWS if options else 0)


def test_the_largest_batch_in_parts_is_the_largest_in_so_many():
    def step(params, small):
        return deep(params, jnp.zeros((len(small), WIDTH)).at[:, 0].set(small))

    options = {"mesh": {"data": 8}, "hardware": "tpu-v5e", "memory": TIGHT, "check": False}
    sizes = ps.largest_batch(step, PARAMS, jax.ShapeDtypeStruct((64 * ROWS,), "float32"), **options, microbatches="auto")
    parts = sizes.largest.plan.rewriting.microbatches
    assert parts > 1
    assert sizes.refused is None  # any batch fits, in more parts
    rows = int(1.05 * sizes.largest.rows) // (8 * parts) * 8 * parts
    with pytest.warns(UserWarning, match="unchecked"):
        ps.plan(step, PARAMS, jax.ShapeDtypeStruct((rows,), "float32"), **options, microbatches=parts)


def test_the_largest_batch_is_compiled():
    sizes = ps.largest_batch(deep, PARAMS, X, mesh={"data": 8}, memory=TIGHT, check=True)
    assert sizes.largest.plan.checked.memory <= TIGHT
    assert sizes.largest.memory == sizes.largest.plan.checked.memory


def test_no_batch_and_no_fit_are_errors():
    with pytest.raises(PlanError):
        ps.largest_batch(deep, PARAMS, X, mesh={"data": 8}, memory=2**14)
    with pytest.raises(ValueError, match='no argument of the step has the role "batch"'):
        ps.largest_batch(lambda w: w * 2, PARAMS, mesh={"data": 8}, check=False)
