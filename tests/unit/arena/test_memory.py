"""The budget against the /proc and /sys of real machines: plain and hybrid cgroups, Docker, Kubernetes, Slurm."""

import pytest

from ckptd.arena import budget as memory
from ckptd.arena.budget import CgroupLevel, Limit
from ckptd.shared.files.mounts import mount_of, parse_mountinfo

GIB = 1 << 30

V2_MOUNTS = """\
22 28 0:20 / /proc rw,nosuid shared:12 - proc proc rw
25 28 0:24 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw,size=16G,huge=advise
26 28 0:25 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate
28 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
"""
V1_MOUNTS = """\
28 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
31 28 0:26 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755
34 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid - cgroup cgroup rw,cpu,cpuacct
35 31 0:30 / /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory
"""
HYBRID_MOUNTS = V1_MOUNTS + "32 31 0:27 / /sys/fs/cgroup/unified rw,nosuid shared:10 - cgroup2 cgroup2 rw,nsdelegate\n"
DOCKER_V1_MOUNTS = """\
700 600 0:50 / / rw,relatime - overlay overlay rw,lowerdir=/a:/b
710 700 0:60 / /dev/shm rw,nosuid - tmpfs shm rw,size=65536k
720 700 0:30 /docker/0123abc /sys/fs/cgroup/memory ro,nosuid,nodev - cgroup cgroup rw,memory
"""
UNLIMITED_V1 = "9223372036854771712\n"


def tree(root, files):
    for path, text in files.items():
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return str(root)


def levels(membership, mounts):
    return [level.directory for level in memory.cgroup_levels(membership, parse_mountinfo(mounts))]


def test_v2_levels_from_the_process_upwards():
    base = "/sys/fs/cgroup"
    slurm = "/system.slice/slurmstepd.scope/job_7/step_0"
    assert levels(f"0::{slurm}\n", V2_MOUNTS) == [
        f"{base}{slurm}",
        f"{base}/system.slice/slurmstepd.scope/job_7",
        f"{base}/system.slice/slurmstepd.scope",
        f"{base}/system.slice",
        base,
    ]


def test_v1_levels_belong_to_the_memory_controller():
    text = "12:cpu,cpuacct:/a\n9:memory:/slurm/uid_1000/job_7\n1:name=systemd:/b\n"
    assert levels(text, V1_MOUNTS)[0] == "/sys/fs/cgroup/memory/slurm/uid_1000/job_7"
    assert levels(text, V1_MOUNTS)[-1] == "/sys/fs/cgroup/memory"


def test_hybrid_levels_are_those_of_both_versions():
    found = memory.cgroup_levels("9:memory:/a\n0::/b\n", parse_mountinfo(HYBRID_MOUNTS))
    assert found == [
        CgroupLevel("/sys/fs/cgroup/memory/a", 1),
        CgroupLevel("/sys/fs/cgroup/memory", 1),
        CgroupLevel("/sys/fs/cgroup/unified/b", 2),
        CgroupLevel("/sys/fs/cgroup/unified", 2),
    ]


def test_a_container_whose_mount_shows_only_its_own_cgroup():
    assert levels("9:memory:/docker/0123abc\n", DOCKER_V1_MOUNTS) == ["/sys/fs/cgroup/memory"]
    assert levels("9:memory:/docker/0123abc/inner\n", DOCKER_V1_MOUNTS)[0] == "/sys/fs/cgroup/memory/inner"


@pytest.mark.parametrize("path", ["/", "/../../other", "/docker/elsewhere"])
def test_a_path_that_the_mount_does_not_show_ends_at_the_mount(path):
    mounts = V2_MOUNTS.replace("0:25 / /sys", "0:25 /mine /sys")
    assert levels(f"0::{path}\n", mounts) == ["/sys/fs/cgroup"]


def test_no_cgroups_at_all():
    assert levels("", "") == []
    assert levels("0::/a\n", "") == []


@pytest.mark.parametrize(
    ("text", "nbytes"), [("max\n", None), ("", None), (UNLIMITED_V1, None), ("1073741824\n", GIB), ("0\n", 0)]
)
def test_numbers_of_cgroup_files(text, nbytes):
    assert memory.parse_cgroup_number(text) == nbytes


def test_inactive_file_cache_counts_as_free():
    assert memory.cgroup_free_nbytes(10, 9, "anon 4\ninactive_file 5\n") == 6
    assert memory.cgroup_free_nbytes(10, 9, "inactive_file 0\ntotal_inactive_file 3\n") == 4
    assert memory.cgroup_free_nbytes(10, 12, "") == 0
    assert memory.cgroup_free_nbytes(10, 2, "inactive_file 5\n") == 10


def test_the_tightest_ancestor_wins(tmp_path):
    base = "/sys/fs/cgroup/system.slice"
    root = tree(
        tmp_path,
        {
            "/proc/self/mountinfo": V2_MOUNTS,
            "/proc/self/cgroup": "0::/system.slice/ckptd@ann.service\n",
            "/proc/meminfo": f"MemTotal: 1 kB\nMemAvailable:   {64 << 20} kB\n",
            f"{base}/memory.max": str(2 * GIB),
            f"{base}/memory.high": "max\n",
            f"{base}/memory.current": str(GIB),
            f"{base}/memory.stat": f"inactive_file {GIB // 2}\n",
            f"{base}/ckptd@ann.service/memory.max": "max\n",
            f"{base}/ckptd@ann.service/memory.current": "0\n",
        },
    )
    budget = memory.budget(str(tmp_path), root=root)
    assert budget.tightest.name == f"memory.max of cgroup {base}"
    assert budget.nbytes == budget.tightest.nbytes_free == int(1.5 * GIB * 15 / 16)
    assert "set-property system.slice MemoryMax=" in budget.tightest.how_to_raise
    assert [limit.name for limit in budget.limits].count("MemAvailable of /proc/meminfo") == 1
    assert list(budget.limits) == sorted(budget.limits, key=lambda limit: limit.nbytes_free)


def test_memory_high_is_a_limit_too(tmp_path):
    base = "/sys/fs/cgroup/a"
    files = {f"{base}/memory.max": "4000000000", f"{base}/memory.high": "3000000000", f"{base}/memory.current": "0"}
    root = tree(tmp_path, {"/proc/self/mountinfo": V2_MOUNTS, "/proc/self/cgroup": "0::/a\n", **files})
    (limit,) = memory.cgroup_limits(root)
    assert limit.name == f"memory.high of cgroup {base}"
    assert limit.nbytes_free == 3000000000 * 15 // 16


def test_v1_docker_limit(tmp_path):
    base = "/sys/fs/cgroup/memory"
    root = tree(
        tmp_path,
        {
            "/proc/self/mountinfo": DOCKER_V1_MOUNTS,
            "/proc/self/cgroup": "9:memory:/docker/0123abc\n",
            f"{base}/memory.limit_in_bytes": str(8 * GIB),
            f"{base}/memory.usage_in_bytes": str(6 * GIB),
            f"{base}/memory.stat": f"inactive_file 1\ntotal_inactive_file {2 * GIB}\n",
        },
    )
    (limit,) = memory.cgroup_limits(root)
    assert limit.nbytes_free == 4 * GIB * 15 // 16
    assert "docker run --memory" in limit.how_to_raise


def test_v1_without_a_limit(tmp_path):
    base = "/sys/fs/cgroup/memory"
    files = {f"{base}/memory.limit_in_bytes": UNLIMITED_V1, f"{base}/memory.usage_in_bytes": "5"}
    root = tree(tmp_path, {"/proc/self/mountinfo": HYBRID_MOUNTS, "/proc/self/cgroup": "9:memory:/\n0::/\n", **files})
    assert memory.cgroup_limits(root) == []


@pytest.mark.parametrize(
    ("directory", "advice"),
    [
        ("/sys/fs/cgroup/system.slice/slurmstepd.scope/job_7", "#SBATCH --mem"),
        ("/sys/fs/cgroup/kubepods.slice/kubepods-pod1.slice", "resources.limits.memory"),
        ("/sys/fs/cgroup/system.slice/docker-0a.scope", "docker run --memory"),
        ("/sys/fs/cgroup/user.slice/user-1000.slice", "set-property user-1000.slice MemoryMax="),
        ("/sys/fs/cgroup", "/sys/fs/cgroup/memory.max"),
    ],
)
def test_advice_names_the_owner_of_the_limit(directory, advice):
    assert advice in memory.how_to_raise_cgroup(CgroupLevel(directory, 2), "memory.max")


def test_dockers_default_shm_is_named_with_what_to_change():
    limit = memory.tmpfs_limit("/dev/shm", 64 << 20)
    assert limit.nbytes_free == 60 << 20
    assert limit.name == "free bytes of /dev/shm"
    assert "--shm-size" in limit.how_to_raise
    assert "remount,size=" in limit.how_to_raise


def test_a_full_tmpfs_leaves_nothing():
    assert memory.tmpfs_limit("/dev/shm", 1 << 20).nbytes_free == 0


def test_an_unreadable_machine_has_no_meminfo_limit():
    assert memory.meminfo_limits("") == []
    assert memory.meminfo_limits("MemAvailable: 16777216 kB\n") == [
        Limit("MemAvailable of /proc/meminfo", 15 * GIB, memory.meminfo_limits("MemAvailable: 1 kB")[0].how_to_raise)
    ]


def test_this_machine():
    budget = memory.budget("/dev/shm/ckptd-not-there-yet")
    assert budget.limits
    assert budget.nbytes == min(limit.nbytes_free for limit in budget.limits)
    assert all(limit.how_to_raise for limit in budget.limits)


def test_the_last_mount_at_a_point_is_the_visible_one():
    mounts = parse_mountinfo(V2_MOUNTS + "30 28 0:27 / /dev/shm rw - tmpfs other rw,size=1k\n")
    found = mount_of("/dev/shm/x", mounts)
    assert found is not None
    assert found.option("size") == "1k"
    assert found.option("huge") is None
    assert found.option("rw") == ""


def test_mounts_with_blanks_and_without_sense():
    mounts = parse_mountinfo(
        "nonsense\n31 28 0:1 / /mnt/my\\040disk rw - ext4 /dev/sdb rw\n28 1 8:1 / / rw - ext4 x rw\n"
    )
    assert [mount.point for mount in mounts] == ["/mnt/my disk", "/"]
    assert mount_of("/mnt/my disk/store", mounts) == mounts[0]
    assert mount_of("/mnt/my diskette", mounts) == mounts[1]
