from __future__ import annotations

import math

import pytest

from penstock_bench.suites.shard.task import Compiler, Task

COMPILERS = [Compiler(), Compiler("cpu", "h100"), *map(Compiler.of_label, ["v5e:2x2", "v5e:2x4", "v5p:2x2x2", "v5e:4x8"])]


def test_a_task_knows_its_axes_and_its_devices():
    task = Task("gpt2", "2x2x2")
    assert (task.axes, task.devices) == ({"data": 2, "fsdp": 2, "model": 2}, 8)


@pytest.mark.parametrize("compiler", COMPILERS, ids=str)
def test_a_label_names_its_compiler_and_meshes_have_all_devices_of_the_compiler(compiler):
    assert Compiler.of_label(compiler.label) == compiler
    tasks = [Task("gpt2", mesh, compiler) for mesh in compiler.meshes]
    assert {math.prod(task.axes.values()) for task in tasks} == {compiler.devices}
    assert all(size > 1 for task in tasks for size in task.axes.values())
    assert len(tasks) >= 2


def test_a_topology_decides_the_hardware():
    assert Compiler.of_label("v6e:2x4").hardware == "tpu-v6e"


def test_a_topology_that_there_is_not_has_no_compiler():
    with pytest.raises(ValueError, match="there is no topology 'v5e:3x3'"):
        Compiler.of_label("v5e:3x3")
