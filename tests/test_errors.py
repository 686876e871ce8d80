"""All errors of penstock have one base class, and are still what `except ValueError` and its like catch."""

import inspect

import pytest

import penstock as ps
from penstock import errors

BUILT_IN = {
    "UnsupportedVersionError": ImportError,
    "CannotStartError": ValueError,
    "WorkerDiedError": RuntimeError,
    "PlanError": ValueError,
    "CompileError": RuntimeError,
    "CompilerMemoryError": RuntimeError,
    "CompilerFailedError": RuntimeError,
    "SplitError": ValueError,
    "OtherStepError": ValueError,
    "ExplicitAxesError": ValueError,
    "DistributedError": RuntimeError,
    "FirstProcessError": RuntimeError,
    "StepError": TypeError,
    "NonfiniteError": ArithmeticError,
    "CheckpointError": RuntimeError,
    "OtherRunError": ValueError,
    "OtherStateError": ValueError,
}


def test_each_error_is_a_penstock_error_and_a_built_in_one():
    classes = {name: each for name, each in vars(errors).items() if inspect.isclass(each) and each.__module__ == errors.__name__}
    assert classes.pop("PenstockError") is ps.PenstockError
    assert classes.keys() == BUILT_IN.keys()
    for name, each in classes.items():
        assert issubclass(each, ps.PenstockError)
        assert issubclass(each, BUILT_IN[name])


def test_a_plan_error_is_caught_as_either():
    for kind in (ps.PenstockError, ValueError):
        with pytest.raises(kind, match="no layout fits"):
            raise ps.PlanError("no layout fits")
