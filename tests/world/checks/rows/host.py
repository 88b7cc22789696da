"""Facts of the checks of the group 'host', and what is said of them."""

from __future__ import annotations

from typing import Any

from samestep.world.checks import clock, cpus, disk, hostname, memlock, memory, open_files, shared_memory, throttling

MIB, GIB = 2**20, 2**30
SHM = shared_memory.Facts
NAME = hostname.Facts("h1", ("10.0.0.2",), ("127.0.0.1", "10.0.0.2"), "", "eth0", 2)
OUT = disk.Folder("/data", 500 * GIB, 10**6, 800.0, "")
TMP = disk.Folder("/tmp", 50 * GIB, 10**6, 800.0, "")

# (check, facts of one machine or of several, status, words of the sentence, words of the line that fixes it)
SEEN: list[tuple[str, Any, str, str, str]] = [
    ("shared_memory", SHM(24 * GIB, 24 * GIB, 2), "OK", "free of", ""),
    ("shared_memory", SHM(64 * MIB, 64 * MIB, 2), "FAIL", "SIGBUS", "remount,size=8G"),
    ("shared_memory", SHM(8 * GIB, 1 * MIB, 2), "FAIL", "it is full", "ls -lS"),
    ("shared_memory", SHM(8 * GIB, GIB, 8), "WARN", "little for 8 ranks", "--shm-size"),
    ("shared_memory", SHM(None, None, 2), "UNKNOWN", "no /dev/shm", ""),
    ("memlock", memlock.Facts(8 * MIB, ()), "OK", "only InfiniBand needs more", ""),
    ("memlock", memlock.Facts(None, ("mlx5_0",)), "OK", "unlimited", ""),
    ("memlock", memlock.Facts(64 * 1024, ("mlx5_0",)), "FAIL", "0.06 MiB", "memlock unlimited"),
    ("open_files", open_files.Facts(1024, 524288, 2), "OK", "1024 files", ""),
    ("open_files", open_files.Facts(512, 524288, 2), "WARN", "512 files", "ulimit -n 65536"),
    ("open_files", open_files.Facts(128, 512, 2), "FAIL", "Too many open files", "limits.d"),
    ("open_files", open_files.Facts(128, 20000, 2), "FAIL", "Too many open files", "ulimit -n 20000"),
    ("open_files", open_files.Facts(1024, 1048576, 512), "FAIL", "too few for 512 ranks", "ulimit -n"),
    ("memory", memory.Facts(24 * GIB, 20 * GIB, None, None, 0, 2), "OK", "20.0 GiB", ""),
    ("memory", memory.Facts(24 * GIB, 20 * GIB, GIB, 300 * MIB, 0, 2), "FAIL", "control group", "--nproc 1"),
    ("memory", memory.Facts(24 * GIB, GIB, None, None, 0, 2), "WARN", "little for 2 ranks", "--nproc 1"),
    ("cpus", cpus.Facts(8, 8, None, "", 2), "OK", "8 of 8 cores", ""),
    ("cpus", cpus.Facts(8, 8, 0.5, "", 2), "WARN", "0.5 cores", "--cpus=2"),
    ("cpus", cpus.Facts(8, 1, None, "", 2), "WARN", "2 ranks share 1 core, of the 8", "taskset"),
    ("cpus", cpus.Facts(8, 8, None, "8", 2), "WARN", "8 threads each", "OMP_NUM_THREADS=4"),
    ("cpus", cpus.Facts(8, 8, None, "all", 2), "FAIL", "no number", "OMP_NUM_THREADS=4"),
    ("throttling", throttling.Facts(3400.0, 3500.0, 0, ("performance",)), "OK", "not throttled", ""),
    ("throttling", throttling.Facts(800.0, 3500.0, 0, ("powersave",)), "WARN", "800 of 3500 MHz", "performance"),
    ("throttling", throttling.Facts(3400.0, 3500.0, 41, ("performance",)), "WARN", "41 times", "sensors"),
    ("throttling", throttling.Facts(0.0, 0.0, None, ()), "UNKNOWN", "does not report", ""),
    ("hostname", NAME, "OK", "10.0.0.2", ""),
    ("hostname", hostname.Facts("h1", ("127.0.1.1",), NAME.mine, "", "eth0", 2), "WARN", "127.0.1.1", "IFNAME=eth0"),
    ("hostname", hostname.Facts("h1", ("127.0.1.1",), NAME.mine, "", "lo", 1), "OK", "127.0.1.1", ""),
    ("hostname", hostname.Facts("h1", (), NAME.mine, "", "eth0", 2), "WARN", "unknown", "IFNAME=eth0"),
    ("hostname", hostname.Facts("h1", ("10.9.9.9",), NAME.mine, "", "lo", 1), "WARN", "none of its", "IFNAME=lo"),
    ("hostname", hostname.Facts("h1", ("10.9.9.9",), NAME.mine, "eth0", "eth0", 2), "OK", "instead", ""),
    ("disk", disk.Facts(OUT, TMP), "OK", "500.0 GiB free", ""),
    ("disk", disk.Facts(disk.Folder("/data", 50 * MIB, None, 90.0, ""), TMP), "FAIL", "50 MiB left", "--out"),
    ("disk", disk.Facts(disk.Folder("/data", 500 * MIB, None, 90.0, ""), TMP), "WARN", "500 MiB left", "--out"),
    ("disk", disk.Facts(disk.Folder("/data", 9 * GIB, 12, 90.0, ""), TMP), "FAIL", "inodes", "--out"),
    ("disk", disk.Facts(disk.Folder("/data", 9 * GIB, None, 0.4, ""), TMP), "WARN", "0.4 MiB/s", "--out"),
    ("disk", disk.Facts(disk.Folder("/data", 0, None, 0, "EROFS: Read-only"), TMP), "FAIL", "EROFS", "--out"),
    ("disk", disk.Facts(OUT, disk.Folder("/tmp", MIB, None, 90.0, "")), "FAIL", "temporary files", "TMPDIR"),
    ("clock", clock.Facts((clock.Offset("h1", 0.02, 0.001),)), "OK", "within 20 ms", ""),
    ("clock", clock.Facts((clock.Offset("h1", -90.0, 0.001),)), "WARN", "90.0 s behind", "set-ntp"),
]
