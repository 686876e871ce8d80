import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import PartitionSpec

import penstock
from penstock import Plan
from penstock.cli import main
from penstock.shard.plan_command import parse_constraint

_JOBS = """
import jax, jax.numpy as jnp

ROWS, WIDTH = 512, 256

def step(state, batch):
    gradient = jax.grad(lambda w: jnp.mean((jnp.tanh(batch @ w["up"]) @ w["down"] - batch) ** 2))(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradient)

def job():
    matrix = jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")
    return step, {"up": matrix, "down": matrix}, jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")

def forward():
    matrix = jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")
    return lambda w, x: jnp.tanh(x @ w), matrix, matrix

def loops():
    def step(state, batch):
        return jax.lax.while_loop(lambda w: w.sum() < 9, lambda w: w * batch.sum(), state)

    return step, jnp.ones((WIDTH, WIDTH)), jnp.ones((ROWS, WIDTH))

def two():
    return job(), job()

def alone():
    return (step,)

def fails():
    raise RuntimeError("no such file: weights.npz")

def bad_step():
    return lambda a, b: a @ b, jnp.ones((2, 3)), jnp.ones((2, 3))

def words():
    return step, "not an array", jnp.ones(3)

class Jobs:
    small = staticmethod(job)

sizes = Jobs()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "jobs_to_plan.py").write_text(_JOBS)
    (folder / "broken_to_plan.py").write_text("import no_such_module_of_ours\n")
    return folder


@pytest.fixture
def planned(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run the command in the folder of the functions: status, stdout, stderr."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            status = main(["plan", *arguments])
        except SystemExit as end:
            status = end.code
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


ON = ("--mesh", "data=2,model=4", "--hardware", "v5e")


def test_plan_is_printed_and_its_files_are_written(planned, tmp_path):
    files = ["--save", f"{tmp_path}/plan.json", "--html", f"{tmp_path}/plan.html"]
    status, out, err = planned("jobs_to_plan:job", *ON, "--memory", "1GiB", *files)
    assert (status, err) == (0, "")
    assert out.startswith("8 × tpu-v5e, mesh data 2 × model 4, limit 1 GiB a device")
    assert str(Plan.load(tmp_path / "plan.json")) == out.rstrip("\n")
    assert "state/up" in (tmp_path / "plan.html").read_text("utf-8")


def test_without_a_mesh_its_shape_is_searched(planned):
    status, out, _ = planned("jobs_to_plan:job", "--devices", "4", "--hardware", "h100")
    assert status == 0
    assert out.startswith("4 × h100")


def test_a_constraint_is_kept(planned, tmp_path):
    path = f"{tmp_path}/plan.json"
    status, _, _ = planned(
        "jobs_to_plan:job", *ON, "--constraint", "up=P('model', None)", "--constraint=batch=P()", "--save", path
    )
    assert status == 0
    stored = {leaf.path: leaf.stored for leaf in Plan.load(path).inputs}
    assert stored["state/up"] == (("model",), ())
    assert stored["batch"] == ((), ())


def test_a_role_is_used(planned, tmp_path):
    path = f"{tmp_path}/plan.json"
    assert planned("jobs_to_plan:job", *ON, "--role", "up=other", "--role=batch=batch", "--save", path)[0] == 0
    roles = {leaf.path: leaf.role for leaf in Plan.load(path).inputs}
    assert (roles["state/up"], roles["batch"]) == ("other", "batch")


def test_a_step_is_changed_so_that_it_fits(planned, tmp_path):
    path = f"{tmp_path}/plan.json"
    status, out, _ = planned("jobs_to_plan:job", *ON, "--microbatches", "2", "--remat", "auto", "--save", path)
    assert (status, Plan.load(path).rewriting.microbatches) == (0, 2)
    assert "the batch runs in 2 parts of 256 rows" in out


def test_verify_compiles_for_the_devices_present(planned):
    status, out, _ = planned("jobs_to_plan:job", *ON, "--verify")
    assert status == 0
    assert "compiled by the CPU compiler for 8 of this process's devices in" in out
    assert out.endswith("kept\n")


def test_only_the_code_is_printed_and_it_runs(planned, tmp_path):
    status, out, err = planned("jobs_to_plan:job", *ON, "--code", "--save", f"{tmp_path}/plan.json")
    assert (status, err) == (0, "")
    module = {}
    exec(out, module)
    weights, batch = jax.numpy.ones((256, 256)), jax.numpy.ones((512, 256))
    state = {"up": weights, "down": weights}
    step = sys.modules["jobs_to_plan"].step
    new = module["jit_step"](step, state, batch, donate_argnums=())(state, batch)
    stored = {leaf.path: leaf.partition_spec for leaf in Plan.load(tmp_path / "plan.json").inputs}
    assert new["up"].sharding.spec == stored["state/up"]


def test_code_and_figures_are_not_printed_together(planned):
    status, out, err = planned("jobs_to_plan:job", *ON, "--code", "--verify")
    assert (status, out) == (2, "")
    assert "--code prints a module, and --verify prints figures: give one of them" in err


def test_a_baseline_is_taken_and_saved_instead_of_the_plan(planned, tmp_path):
    path = f"{tmp_path}/plan.json"
    status, _, _ = planned("jobs_to_plan:job", *ON, "--take", "data parallel", "--save", path)
    assert status == 0
    loaded = Plan.load(path)
    assert loaded.cost == loaded.baselines["data parallel"]
    assert not any(leaf.mesh_axes for leaf in loaded.inputs if leaf.role == "parameters")


def test_a_baseline_that_a_plan_does_not_have_is_named_with_those_that_it_has(planned):
    status, _, err = planned("jobs_to_plan:job", *ON, "--take", "FSPD")
    assert status == 2
    assert "--take: there is no alternative 'FSPD'; there are 'data parallel'" in err


def test_baselines_are_compiled_beside_the_plan(planned):
    status, out, _ = planned("jobs_to_plan:job", *ON, "--verify", "--baselines")
    assert status == 0
    assert "baselines: predicted, compiler" in out
    assert "\n  data parallel " in out.rpartition("baselines: predicted")[2]
    status, _, err = planned("jobs_to_plan:job", *ON, "--baselines")
    assert status == 2
    assert "give --verify too" in err


def test_unknown_costs_are_printed_for_the_prediction_and_for_the_compiler(planned):
    _, out, _ = planned("jobs_to_plan:loops", *ON, "--verify")
    said = [line.strip().partition("1 loop of unknown length")[0] for line in out.splitlines() if "unknown" in line]
    assert said == ["", "predicted: ", "compiler: "]


def test_a_plan_far_below_its_limit_is_compiled_only_if_asked_for(planned, monkeypatch):
    status, out, _ = planned("jobs_to_plan:forward", *ON, "--check", "yes")
    assert status == 0
    assert "compiled by" in out
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    assert planned("jobs_to_plan:forward", *ON)[0] == 0


def test_without_a_check_a_plan_above_its_limit_is_printed_with_a_warning(planned):
    status, out, err = planned("jobs_to_plan:job", *ON, "--check", "no", "--memory", "150KiB")
    assert status == 0
    assert "unchecked: the memory is predicted" in out
    assert err.startswith("penstock plan: warning: the plan is unchecked: it is predicted to need ")
    assert err.count("\n") == 1


def test_the_command_runs_as_a_process_in_its_folder(folder):
    command = [sys.executable, "-m", "penstock", "plan", "jobs_to_plan:job", *ON, "--verify"]
    environment = os.environ | {"PYTHONPATH": str(Path(penstock.__file__).parents[1])}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    # The process has one device, not eight.
    assert "compiled by the CPU compiler for 8 virtual devices in" in done.stdout


@pytest.mark.parametrize("name", ["Jobs.small", "sizes.small"])
def test_a_method_of_a_class_or_an_object_can_be_named(planned, name):
    assert planned(f"jobs_to_plan:{name}", *ON)[::2] == (0, "")


def test_unknown_hardware_lists_the_known_names_once(planned):
    _, _, err = planned("jobs_to_plan:job", "--devices", "8", "--hardware", "abacus")
    assert err.count("tpu-v5e") == 1


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["nowhere_to_plan:job"], 2, ["no module 'nowhere_to_plan'", "nowhere_to_plan.py"]),
        (["jobs_to_plan:jab"], 2, ["no function 'jab'", "job"]),
        (["jobs_to_plan:Jobs.smal"], 2, ["no function 'Jobs.smal'", "functions that it has: Jobs.small"]),
        (["jobs_to_plan:jabs.small"], 2, ["no function 'jabs.small'", "Jobs"]),
        (["jobs_to_plan"], 2, ["'jobs_to_plan' is not a module:function"]),
        (["jobs_to_plan:two"], 2, ["returned (tuple, tuple)", "(step, *arguments)"]),
        (["jobs_to_plan:alone"], 2, ["returned (function)"]),
        (["jobs_to_plan:words"], 2, ["not an array", "str"]),
        (["jobs_to_plan:job", "--hardware", "tpu-v9"], 2, ['"tpu-v9" is not known', "tpu-v5e"]),
        (["jobs_to_plan:job", "--devices", "4"], 2, ["devices=4"]),
        (["jobs_to_plan:job", "--memory", "100KiB"], 1, ["no layout fits 100 KiB"]),
        (["jobs_to_plan:job", "--memory", "much"], 2, ["--memory", "'much' is not a number of bytes"]),
        (["jobs_to_plan:job", "--check", "v5e:4x4"], 2, ["v5e:4x4 has 16 devices", "needs 8", "v5e:2x4"]),
        (["jobs_to_plan:job", "--devices", "0"], 2, ["--devices", "0: needs an integer >= 1"]),
        (["jobs_to_plan:job", "--mesh", "data"], 2, ["--mesh", "data=2,model=4"]),
        (["jobs_to_plan:job", "--mesh", "a=2,a=4"], 2, ["--mesh", "different names"]),
        (["jobs_to_plan:job", "--constraint", "up=Q(1)"], 2, ["--constraint", "needs a path and a layout"]),
        (["jobs_to_plan:job", "--constraint", "op=P('model')"], 2, ["'op' matches no leaf", "the nearest are 'up'"]),
        (["jobs_to_plan:job", "--role", "up=weights"], 2, ["--role", "one of parameters, optimizer, batch, other"]),
        (["jobs_to_plan:job", "--role", "op=other"], 2, ["'op' matches no leaf", "the nearest are 'up'"]),
        (["jobs_to_plan:job", "--microbatches", "3"], 2, ["microbatches=3: the 512 rows of the batch do not divide"]),
        (["jobs_to_plan:job", "--microbatches", "few"], 2, ["--microbatches", "few"]),
        (["jobs_to_plan:forward", "--remat", "auto"], 2, ["no backward pass was found in this step"]),
        (["jobs_to_plan:job", "--html", "/no/such/folder/plan.html"], 2, ["--html", "/no/such/folder"]),
        (["jobs_to_plan:job", "--save", "."], 2, ["--save .: is a folder"]),
    ],
)
def test_an_error_is_printed_in_one_line(planned, arguments, status, words):
    found, out, err = planned(*ON, *arguments)
    assert (found, out) == (status, "")
    assert err.startswith("penstock plan: error: ")
    assert err.count("\n") == 1
    assert [word for word in words if word not in err] == []


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("fails", ["RuntimeError: no such file: weights.npz", 'raise RuntimeError("no such file']),
        ("bad_step", ["lambda a, b: a @ b", "TypeError"]),
    ],
)
def test_errors_of_the_function_or_the_step_show_their_own_lines(planned, function, words):
    status, out, err = planned(f"jobs_to_plan:{function}", *ON)
    assert (status, out) == (1, "")
    assert [word for word in words if word not in err] == []
    assert "shard/command.py" not in err
    assert err.splitlines()[-1].startswith(f"penstock plan: error: jobs_to_plan:{function} raised")


def test_a_module_that_cannot_be_imported_shows_why(planned):
    status, _, err = planned("broken_to_plan:job", *ON)
    assert status == 1
    assert "import no_such_module_of_ours" in err
    assert "importlib" not in err


def test_help_has_a_worked_example(planned):
    status, out, _ = planned("--help")
    assert status == 0
    for words in ("module:name", "def job():", "return step, state", "--verify v5e:2x4", "exit status", "--check v5e:2x4"):
        assert words in out


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ('w=P("model", None)', PartitionSpec("model", None)),
        ("w = PartitionSpec(('data', 'model'))", PartitionSpec(("data", "model"))),
        ("w=P()", PartitionSpec()),
        ("w=P(P.UNCONSTRAINED, 'model')", PartitionSpec(PartitionSpec.UNCONSTRAINED, "model")),
    ],
)
def test_constraints_are_read(text, spec):
    assert parse_constraint(text) == ("w", spec)


@pytest.mark.parametrize(
    "text",
    [
        "w",
        "=P()",
        "w=P",
        "w=P(*['a'])",
        "w=P(a='b')",
        "w=__import__('os').system('false')",
        "w=P('a', ('b', 3))",
        "w=P(",
    ],
)
def test_text_that_is_no_constraint_is_refused_and_not_evaluated(text):
    with pytest.raises(ValueError, match="needs a path and a layout"):
        parse_constraint(text)
