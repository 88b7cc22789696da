"""Faults of the machine: limits, memory, disks, its name, throttling."""

from __future__ import annotations

from world.faults.fault import Fault, env, grouped, mounts, sys_class, tmpfs

OUT = ("--out", "/tmp/samestep-doctor-out")
HOT = "/sys/devices/system/cpu"
FAULTS = (
    Fault("/dev/shm of 64 MiB", "shared_memory", "SIGBUS", tmpfs("/dev/shm", "size=64m")),
    Fault(
        "/dev/shm is full",
        "shared_memory",
        "it is full",
        tmpfs("/dev/shm", "size=512m", "dd if=/dev/zero of=/dev/shm/x bs=1M count=500 status=none"),
    ),
    Fault("128 open files", "open_files", "Too many open files", 'ulimit -n 128; "$@"'),
    Fault("512 open files", "open_files", "512 files", 'ulimit -S -n 512; "$@"', fixes="ulimit -n"),
    Fault("locked memory beside InfiniBand", "memlock", "mlx5_0", sys_class("4: ACTIVE", "5: LinkUp")),
    Fault("a memory limit of 600 MiB", "memory", "control group", grouped("memory", "memory.limit_in_bytes=629145600")),
    Fault("a limit of half a core", "cpus", "0.5 cores", grouped("cpu", "cpu.cfs_quota_us=50000")),
    Fault("bound to one core", "cpus", "share 1 core", 'taskset -c 0 "$@"', fixes="taskset"),
    env("8 threads a rank", "cpus", "8 threads each", OMP_NUM_THREADS="8"),
    env("OMP_NUM_THREADS=all", "cpus", "no number", OMP_NUM_THREADS="all"),
    Fault("--out is full", "disk", "MiB left: weights", tmpfs(OUT[1], "size=50m"), options=OUT),
    Fault("--out is nearly full", "disk", "MiB left", tmpfs(OUT[1], "size=500m"), options=OUT),
    Fault("--out is read-only", "disk", "EROFS", tmpfs(OUT[1], "ro"), options=OUT),
    Fault("--out has no inodes", "disk", "inodes", tmpfs(OUT[1], "nr_inodes=20,size=2g"), options=OUT),
    Fault(
        "TMPDIR is full",
        "disk",
        "temporary files",
        tmpfs("/tmp/samestep-doctor-tmp", "size=60m"),
        {"TMPDIR": "/tmp/samestep-doctor-tmp"},
    ),
    Fault("the hostname is unknown", "hostname", "unknown", mounts("hostname nowhere9")),
    Fault(
        "the hostname is another machine",
        "hostname",
        "none of its addresses",
        mounts('echo "10.9.9.9 else1" >$T/hosts; hostname else1; mount --bind $T/hosts /etc/hosts'),
    ),
    Fault(
        "a core was throttled",
        "throttling",
        "41 times",
        mounts(
            f"on=$(cat {HOT}/online); mount -t tmpfs tmpfs {HOT}; echo $on >{HOT}/online; "
            f"mkdir -p {HOT}/cpu0/thermal_throttle; echo 41 >{HOT}/cpu0/thermal_throttle/core_throttle_count"
        ),
    ),
)
