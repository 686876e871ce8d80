"""The memory that is free, as the files of cgroups say."""

import pytest
from tests.environment.test_machine import hierarchy

from penstock_bench.activity import free_in_cgroup


@pytest.mark.parametrize("version", [1, 2])
def test_memory_that_a_cgroup_leaves_is_its_limit_without_what_is_used_except_the_page_cache(tmp_path, version):
    proc = hierarchy(tmp_path, version, 2 * 2**30, None)
    assert free_in_cgroup(proc) is None  # its use is unknown
    for file in list(tmp_path.rglob("memory.max")) + list(tmp_path.rglob("memory.limit_in_bytes")):
        file.with_name("memory.current" if version == 2 else "memory.usage_in_bytes").write_text(f"{3 * 2**29}\n")
        name = "inactive_file" if version == 2 else "total_inactive_file"
        file.with_name("memory.stat").write_text(f"anon 5\n{name} {2**29}\n")
    assert free_in_cgroup(proc) == 2**30
    assert free_in_cgroup(hierarchy(tmp_path / "none", version, None, None)) is None
