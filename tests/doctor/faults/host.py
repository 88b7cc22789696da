"""Faults of the machine: limits, memory, disks, its name, throttling."""

from __future__ import annotations

from doctor.faults.fault import Fault, env, grouped, mounts, sys_class, tmpfs

OUT = ("--out", "/tmp/samestep-doctor-out")
HOT = "/sys/devices/system/cpu"
FAULTS = (
    Fault("/dev/shm of 64 MiB", "shared_memory", "shared_memory_is_small", tmpfs("/dev/shm", "size=64m")),
    Fault(
        "/dev/shm is full",
        "shared_memory",
        "shared_memory_is_full",
        tmpfs("/dev/shm", "size=512m", "dd if=/dev/zero of=/dev/shm/x bs=1M count=500 status=none"),
    ),
    Fault("128 open files", "open_files", "open_files_are_too_few_for_ranks", 'ulimit -n 128; "$@"'),
    Fault(
        "512 open files",
        "open_files",
        "open_files_are_few_for_loader_workers",
        'ulimit -S -n 512; "$@"',
        fixes="ulimit -n",
    ),
    Fault(
        "locked memory beside InfiniBand", "memlock", "locked_memory_is_too_little", sys_class("4: ACTIVE", "5: LinkUp")
    ),
    Fault(
        "a memory limit of 600 MiB",
        "memory",
        "memory_is_too_little_for_ranks",
        grouped("memory", "memory.limit_in_bytes=629145600"),
    ),
    Fault(
        "a limit of half a core", "cpus", "control_group_allows_too_few_cores", grouped("cpu", "cpu.cfs_quota_us=50000")
    ),
    Fault("bound to one core", "cpus", "ranks_share_cores", 'taskset -c 0 "$@"', fixes="taskset"),
    env("8 threads a rank", "cpus", "threads_exceed_cores", OMP_NUM_THREADS="8"),
    env("OMP_NUM_THREADS=all", "cpus", "omp_num_threads_is_no_number", OMP_NUM_THREADS="all"),
    Fault("--out is full", "disk", "disk_has_no_room_for_weights", tmpfs(OUT[1], "size=50m"), options=OUT),
    Fault("--out is nearly full", "disk", "disk_has_little_room", tmpfs(OUT[1], "size=500m"), options=OUT),
    Fault("--out is read-only", "disk", "disk_takes_no_file", tmpfs(OUT[1], "ro"), options=OUT),
    Fault("--out has no inodes", "disk", "disk_has_no_inodes", tmpfs(OUT[1], "nr_inodes=20,size=2g"), options=OUT),
    Fault(
        "TMPDIR is full",
        "disk",
        "disk_has_no_room_for_weights",
        tmpfs("/tmp/samestep-doctor-tmp", "size=60m"),
        {"TMPDIR": "/tmp/samestep-doctor-tmp"},
    ),
    Fault("the hostname is unknown", "hostname", "hostname_is_unknown", mounts("hostname nowhere9")),
    Fault(
        "the hostname is another machine",
        "hostname",
        "hostname_is_of_another_machine",
        mounts('echo "10.9.9.9 else1" >$T/hosts; hostname else1; mount --bind $T/hosts /etc/hosts'),
    ),
    Fault(
        "a core was throttled",
        "throttling",
        "core_was_throttled",
        mounts(
            f"on=$(cat {HOT}/online); mount -t tmpfs tmpfs {HOT}; echo $on >{HOT}/online; "
            f"mkdir -p {HOT}/cpu0/thermal_throttle; echo 41 >{HOT}/cpu0/thermal_throttle/core_throttle_count"
        ),
    ),
)
