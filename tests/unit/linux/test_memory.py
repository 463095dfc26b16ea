"""Memory limits of control groups, version 1 and 2, of this group and of those above it, read from real files."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.linux.memory import OomKills, available_bytes

_GIB = 1 << 30
_MOUNT_V1 = "36 32 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
_MOUNT_V2 = "31 24 0:27 {root} /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
_MOUNT_HYBRID = "42 32 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
_UNLIMITED_V1 = 9223372036854771712


class _Machine:
    """A tree of files such as the kernel shows to a process."""

    def __init__(self, root: Path, cgroup: str, mounts: str) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable:   {32 << 20} kB\n")
        self.write("proc/vmstat", "nr_free_pages 5\noom_kill 7\n")
        self.write("proc/self/cgroup", cgroup)
        self.write("proc/self/mountinfo", "22 1 0:21 / /proc rw - proc proc rw\n" + mounts)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def v1(self, path: str, limit: int, used: int, *, inactive: int = 0, oom: int = 0, above: int = 0) -> None:
        at = f"sys/fs/cgroup/memory/{path}"
        self.write(f"{at}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{at}/memory.usage_in_bytes", f"{used}\n")
        self.write(f"{at}/memory.oom_control", f"oom_kill_disable 0\nunder_oom 0\noom_kill {oom}\n")
        hierarchical = f"hierarchical_memory_limit {above or _UNLIMITED_V1}\n"
        self.write(f"{at}/memory.stat", f"inactive_file 1\n{hierarchical}total_inactive_file {inactive}\n")

    def v2(self, path: str, limit: str, used: int, *, high: str = "max", inactive: int = 0, oom: int = 0) -> None:
        at = f"sys/fs/cgroup/{path}"
        self.write(f"{at}/memory.max", f"{limit}\n")
        self.write(f"{at}/memory.high", f"{high}\n")
        self.write(f"{at}/memory.current", f"{used}\n")
        self.write(f"{at}/memory.stat", f"anon 12\ninactive_file {inactive}\n")
        self.write(f"{at}/memory.events", f"low 0\nhigh 0\nmax 3\noom 1\noom_kill {oom}\n")


def test_without_control_groups_the_machines_memory_counts(tmp_path: Path) -> None:
    machine = _Machine(tmp_path, "", "")
    assert available_bytes(machine.root) == 32 * _GIB
    assert OomKills(machine.root).count() == 7


def test_v2_the_limits_of_all_groups_above_count(tmp_path: Path) -> None:
    machine = _Machine(tmp_path, "0::/pods/pod/worker\n", _MOUNT_V2.format(root="/"))
    machine.v2("pods/pod/worker", "max", _GIB)
    machine.v2("pods/pod", str(8 * _GIB), 3 * _GIB, inactive=_GIB)
    machine.v2("pods", str(40 * _GIB), 30 * _GIB)
    assert available_bytes(machine.root) == 6 * _GIB  # pod: 8 - (3 - 1)
    machine.v2("pods", str(40 * _GIB), 38 * _GIB)
    assert available_bytes(machine.root) == 2 * _GIB


def test_v2_memory_high_counts_as_a_limit(tmp_path: Path) -> None:
    machine = _Machine(tmp_path, "0::/job\n", _MOUNT_V2.format(root="/"))
    machine.v2("job", str(8 * _GIB), _GIB, high=str(4 * _GIB))
    assert available_bytes(machine.root) == 3 * _GIB


def test_v2_in_a_container_whose_root_is_its_own_group(tmp_path: Path) -> None:
    machine = _Machine(tmp_path, "0::/\n", _MOUNT_V2.format(root="/"))
    machine.v2("", str(2 * _GIB), _GIB // 2, oom=4)
    assert available_bytes(machine.root) == 3 * _GIB // 2
    assert OomKills(machine.root).count() == 4


@pytest.mark.parametrize("seen_as", ["/docker/abc", "/docker/abc/job"])
def test_v1_in_a_container_whose_mount_begins_at_its_own_group(tmp_path: Path, seen_as: str) -> None:
    machine = _Machine(tmp_path, f"5:cpu:/x\n4:memory:{seen_as}\n0::/\n", _MOUNT_V1.format(root="/docker/abc"))
    machine.v1("", 4 * _GIB, _GIB, inactive=_GIB // 2)
    machine.v1("job", _UNLIMITED_V1, _GIB // 4)
    assert available_bytes(machine.root) == 7 * _GIB // 2


def test_v1_the_limits_of_all_groups_above_count(tmp_path: Path) -> None:
    machine = _Machine(tmp_path, "4:memory:/slurm/job/step\n", _MOUNT_V1.format(root="/"))
    machine.v1("", _UNLIMITED_V1, 40 * _GIB)
    machine.v1("slurm", _UNLIMITED_V1, 40 * _GIB)
    machine.v1("slurm/job", 16 * _GIB, 4 * _GIB)
    machine.v1("slurm/job/step", _UNLIMITED_V1, _GIB, oom=2)
    assert available_bytes(machine.root) == 12 * _GIB
    assert OomKills(machine.root).count() == 2


def test_v1_a_limit_above_what_is_mounted_is_known_from_the_statistics(tmp_path: Path) -> None:
    machine = _Machine(tmp_path, "4:memory:/docker/abc\n", _MOUNT_V1.format(root="/docker/abc"))
    machine.v1("", _UNLIMITED_V1, _GIB, above=3 * _GIB)
    assert available_bytes(machine.root) == 2 * _GIB


def test_both_versions_mounted_as_on_older_distributions(tmp_path: Path) -> None:
    mounts = _MOUNT_V1.format(root="/") + _MOUNT_HYBRID
    machine = _Machine(tmp_path, "4:memory:/user\n1:name=systemd:/user\n0::/user\n", mounts)
    machine.v1("user", 5 * _GIB, _GIB, oom=1)
    machine.write("sys/fs/cgroup/unified/user/cgroup.procs", "")
    assert available_bytes(machine.root) == 4 * _GIB
    assert OomKills(machine.root).count() == 1


def test_usage_above_the_limit_leaves_zero(tmp_path: Path) -> None:
    machine = _Machine(tmp_path, "0::/job\n", _MOUNT_V2.format(root="/"))
    machine.v2("job", str(_GIB), 2 * _GIB)
    assert available_bytes(machine.root) == 0


def test_a_control_group_that_is_not_mounted_is_no_error(tmp_path: Path) -> None:
    machine = _Machine(tmp_path, "0::/../../elsewhere\n", _MOUNT_V2.format(root="/"))
    assert available_bytes(machine.root) == 32 * _GIB


def test_available_memory_of_this_machine() -> None:
    assert 0 < available_bytes() < 1 << 50
    assert OomKills().count() >= 0
