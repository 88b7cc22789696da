"""Facts of the probes of 'host', and what is found in them."""

from __future__ import annotations

from doctor.probes.row import Row
from samestep.doctor.probes.host import Clocks, Disks, Folder, Hostname, Offset, ProcessorClocks
from samestep.doctor.probes.limits import Cpus, LockedMemory, Memory, OpenFiles, SharedMemory

MIB, GIB = 2**20, 2**30
NAME = Hostname("h1", ("10.0.0.2",), ("127.0.0.1", "10.0.0.2"), "", "eth0", 2)
OUT = Folder("/data", 500 * GIB, 10**6, 800.0, "")
TMP = Folder("/tmp", 50 * GIB, 10**6, 800.0, "")

ROWS: list[Row] = [
    ("shared_memory", SharedMemory(24 * GIB, 24 * GIB, 2), "OK", "shared_memory_is_free", {}, ""),
    ("shared_memory", SharedMemory(64 * MIB, 64 * MIB, 2), "FAIL", "shared_memory_is_small", {}, "remount,size=8G"),
    ("shared_memory", SharedMemory(8 * GIB, 1 * MIB, 2), "FAIL", "shared_memory_is_full", {}, "ls -lS"),
    ("shared_memory", SharedMemory(8 * GIB, GIB, 8), "WARN", "shared_memory_is_scarce", {"nproc": 8}, "--shm-size"),
    ("shared_memory", SharedMemory(None, None, 2), "UNKNOWN", "no_shared_memory", {"folder": "/dev/shm"}, ""),
    ("memlock", LockedMemory(8 * MIB, ()), "OK", "locked_memory_is_limited", {}, ""),
    ("memlock", LockedMemory(None, ("mlx5_0",)), "OK", "locked_memory_is_unlimited", {}, ""),
    ("memlock", LockedMemory(64 * 1024, ("mlx5_0",)), "FAIL", "locked_memory_is_too_little", {}, "memlock unlimited"),
    ("open_files", OpenFiles(1024, 524288, 2), "OK", "open_files_are_limited", {"limit": 1024}, ""),
    (
        "open_files",
        OpenFiles(512, 524288, 2),
        "WARN",
        "open_files_are_few_for_loader_workers",
        {"limit": 512},
        "ulimit -n 65536",
    ),
    ("open_files", OpenFiles(128, 512, 2), "FAIL", "open_files_are_too_few_for_ranks", {}, "limits.d"),
    ("open_files", OpenFiles(128, 20000, 2), "FAIL", "open_files_are_too_few_for_ranks", {}, "ulimit -n 20000"),
    (
        "open_files",
        OpenFiles(1024, 1048576, 512),
        "FAIL",
        "open_files_are_too_few_for_ranks",
        {"ranks": 512},
        "ulimit -n",
    ),
    ("memory", Memory(24 * GIB, 20 * GIB, None, None, 0, 2), "OK", "memory_is_free", {"free_gib": 20.0}, ""),
    (
        "memory",
        Memory(24 * GIB, 20 * GIB, GIB, 300 * MIB, 0, 2),
        "FAIL",
        "memory_is_too_little_for_ranks",
        {},
        "--nproc 1",
    ),
    (
        "memory",
        Memory(24 * GIB, GIB, None, None, 0, 2),
        "WARN",
        "memory_is_scarce_for_ranks",
        {"nproc": 2},
        "--nproc 1",
    ),
    ("cpus", Cpus(8, 8, None, "", 2), "OK", "ranks_have_cores", {"usable": 8, "existing": 8}, ""),
    ("cpus", Cpus(8, 8, 0.5, "", 2), "WARN", "control_group_allows_too_few_cores", {"cores": 0.5}, "--cpus=2"),
    ("cpus", Cpus(8, 1, None, "", 2), "WARN", "ranks_share_cores", {"nproc": 2, "usable": 1, "existing": 8}, "taskset"),
    ("cpus", Cpus(8, 8, None, "8", 2), "WARN", "threads_exceed_cores", {"threads": 8, "cores": 8}, "OMP_NUM_THREADS=4"),
    ("cpus", Cpus(8, 8, None, "all", 2), "FAIL", "omp_num_threads_is_no_number", {}, "OMP_NUM_THREADS=4"),
    ("throttling", ProcessorClocks(3400.0, 3500.0, 0, ("performance",)), "OK", "processor_is_not_throttled", {}, ""),
    (
        "throttling",
        ProcessorClocks(800.0, 3500.0, 0, ("powersave",)),
        "WARN",
        "core_is_slow_under_powersave",
        {"mhz": 800.0, "greatest_mhz": 3500.0},
        "performance",
    ),
    (
        "throttling",
        ProcessorClocks(3400.0, 3500.0, 41, ("performance",)),
        "WARN",
        "core_was_throttled",
        {"times": 41},
        "sensors",
    ),
    ("throttling", ProcessorClocks(0.0, 0.0, None, ()), "UNKNOWN", "processor_clock_is_not_reported", {}, ""),
    ("hostname", NAME, "OK", "hostname_has_addresses", {"addresses": ["10.0.0.2"]}, ""),
    (
        "hostname",
        Hostname("h1", ("127.0.1.1",), NAME.local, "", "eth0", 2),
        "WARN",
        "hostname_is_loopback",
        {"addresses": ["127.0.1.1"]},
        "IFNAME=eth0",
    ),
    (
        "hostname",
        Hostname("h1", ("127.0.1.1",), NAME.local, "", "lo", 1),
        "OK",
        "hostname_has_addresses",
        {"addresses": ["127.0.1.1"]},
        "",
    ),
    ("hostname", Hostname("h1", (), NAME.local, "", "eth0", 2), "WARN", "hostname_is_unknown", {}, "IFNAME=eth0"),
    (
        "hostname",
        Hostname("h1", ("10.9.9.9",), NAME.local, "", "lo", 1),
        "WARN",
        "hostname_is_of_another_machine",
        {},
        "IFNAME=lo",
    ),
    (
        "hostname",
        Hostname("h1", ("10.9.9.9",), NAME.local, "eth0", "eth0", 2),
        "OK",
        "hostname_is_not_used_by_gloo",
        {},
        "",
    ),
    ("disk", Disks(OUT, TMP), "OK", "disk_has_room", {"free_gib": 500.0}, ""),
    (
        "disk",
        Disks(Folder("/data", 50 * MIB, None, 90.0, ""), TMP),
        "FAIL",
        "disk_has_no_room_for_weights",
        {"free_mib": 50.0},
        "--out",
    ),
    (
        "disk",
        Disks(Folder("/data", 500 * MIB, None, 90.0, ""), TMP),
        "WARN",
        "disk_has_little_room",
        {"free_mib": 500.0},
        "--out",
    ),
    ("disk", Disks(Folder("/data", 9 * GIB, 12, 90.0, ""), TMP), "FAIL", "disk_has_no_inodes", {}, "--out"),
    ("disk", Disks(Folder("/data", 9 * GIB, None, 0.4, ""), TMP), "WARN", "disk_is_slow", {"mib_s": 0.4}, "--out"),
    ("disk", Disks(Folder("/data", 0, None, 0, "EROFS: Read-only"), TMP), "FAIL", "disk_takes_no_file", {}, "--out"),
    ("disk", Disks(OUT, Folder("/tmp", MIB, None, 90.0, "")), "FAIL", "disk_has_no_room_for_weights", {}, "TMPDIR"),
    ("clock", Clocks((Offset("h1", 0.02, 0.001),)), "OK", "clocks_agree", {"milliseconds": 20.0}, ""),
    ("clock", Clocks((Offset("h1", -90.0, 0.001),)), "WARN", "clock_is_behind", {"seconds": 90.0}, "set-ntp"),
]
