"""Injects faults into this machine, and into hosts in network namespaces, and looks whether the doctor names each.

    python tests/world/plant_faults.py --out results/doctor_…      (minutes; root, iproute2)

Each fault is real: limits, control groups, mounts, environments, links that are shaped and cut. InfiniBand's files and
thermal counters are planted where there is no such hardware. Keeps a line for each fault and for each healthy run.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from cluster.hosts import Hosts, ip, tc

DOCTOR = [sys.executable, "-m", "samestep", "doctor", "--json"]
SOURCE = Path(__file__).parents[2] / "src"
ALARMS = ("WARN", "FAIL")
SKEW = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(id, now);
    if (id == CLOCK_REALTIME) now->tv_sec += 90;
    return failed;
}
"""


def mounts(lines: str) -> str:
    """A shell line that runs the doctor with mounts of its own."""
    inner = lines + '; exec "$@"'
    return f'unshare -m -u sh -c {shlex.quote(inner)} sh "$@"'


def tmpfs(folder: str, options: str, after: str = "true") -> str:
    return mounts(f"mkdir -p {folder}; mount -t tmpfs -o {options} tmpfs {folder} && {after}")


def sys_class(state: str, physical: str) -> str:
    """InfiniBand's files, as the kernel writes them for one adapter."""
    port = "/sys/class/infiniband/mlx5_0/ports/1"
    lines = f"mount -t tmpfs tmpfs /sys/class; mkdir -p {port}; echo '{state}' >{port}/state; "
    return mounts(lines + f"echo '{physical}' >{port}/phys_state; echo '200 Gb/sec (4X HDR)' >{port}/rate")


def grouped(controller: str, settings: str) -> str:
    """A control group of its own, version 1. settings: as in 'cpu.cfs_quota_us=50000'."""
    folder = f"/sys/fs/cgroup/{controller}/samestep-doctor"
    writes = "; ".join(
        f"echo {value} >{folder}/{name}" for name, _, value in (s.partition("=") for s in settings.split())
    )
    return f'mkdir -p {folder}; {writes}; echo $$ >{folder}/cgroup.procs; "$@"'


@dataclass(frozen=True)
class Fault:
    """shell: runs the doctor, which is "$@"; $T is an empty folder. torch: whether it needs the checks with torch."""

    name: str
    check: str
    says: str
    shell: str = '"$@"'
    env: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    torch: bool = False
    fixes: str = ""


def env(name: str, check: str, says: str, **variables: str) -> Fault:
    return Fault(name, check, says, env=variables)


OUT = ("--out", "/tmp/samestep-doctor-out")
SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SRUN |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
HOLDER = 'import socket, time; s = socket.create_server(("127.0.0.1", 29533)); time.sleep(60)'
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
    Fault("InfiniBand's port is down", "infiniband", "1: DOWN", sys_class("1: DOWN", "3: Disabled")),
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
    env("no UTF-8", "locale", "UnicodeDecodeError", LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0"),
    env("another environment is active", "installation", "is active", VIRTUAL_ENV="/opt/other"),
    Fault(
        "torchrun of another environment",
        "installation",
        "the torchrun in PATH",
        'mkdir $T/bin; printf "#!/opt/other/bin/python\\n" >$T/bin/torchrun; chmod +x $T/bin/torchrun; '
        'PATH=$T/bin:$PATH "$@"',
    ),
    Fault("a torch.py beside the job", "installation", "hides", 'cd $T; touch torch.py; "$@"'),
    env("RANK is left in the shell", "launch_variables", "no launcher has started", RANK="0", WORLD_SIZE="1"),
    env(
        "RANK is not below WORLD_SIZE",
        "launch_variables",
        "is not below",
        RANK="5",
        WORLD_SIZE="2",
        LOCAL_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29555",
    ),
    env("WORLD_SIZE alone", "launch_variables", "has no", WORLD_SIZE="4", RANK="0"),
    Fault(
        "WORLD_SIZE contradicts Slurm",
        "launch_variables",
        "contradicts",
        env=SRUN | {"WORLD_SIZE": "8", "RANK": "0", "LOCAL_RANK": "0"},
    ),
    env("MASTER_PORT=http", "launch_variables", "http", MASTER_PORT="http"),
    Fault(
        "the port is held",
        "port",
        "is taken by process",
        f"{sys.executable} -c '{HOLDER}' & sleep 1; \"$@\"; code=$?; kill $!; exit $code",
        options=("--port", "29533"),
    ),
    env("NCCL_SOCKET_IFNAMES", "variables", "NCCL_SOCKET_IFNAME?", NCCL_SOCKET_IFNAMES="lo"),
    env("TORCH_DISTRIBUTED_DEBUG=on", "variables", "OFF, INFO, DETAIL", TORCH_DISTRIBUTED_DEBUG="on"),
    env("TORCH_DISTRIBUTED_DEBUG=DETAIL", "variables", "slows", TORCH_DISTRIBUTED_DEBUG="DETAIL"),
    env("an older name of NCCL's", "variables", "is now", NCCL_ASYNC_ERROR_HANDLING="1"),
    env("quotes in a value", "variables", "quotes", NCCL_ALGO="'Ring'"),
    env("gloo's interface does not exist", "interfaces", "no interface eth9", GLOO_SOCKET_IFNAME="eth9"),
    Fault(
        "gloo's interface is down",
        "interfaces",
        "is down",
        'unshare -n sh -c \'ip link set lo up; ip link add down0 type bridge; exec "$@"\' sh "$@"',
        {"GLOO_SOCKET_IFNAME": "down0"},
    ),
    env("NCCL's interface does not exist", "interfaces", "fits no interface", NCCL_SOCKET_IFNAME="ib"),
    Fault(
        "a library does not import",
        "engine_packages",
        "accelerate",
        'mkdir -p $T/accelerate; echo "raise ImportError(\\"broken on purpose\\")" >$T/accelerate/__init__.py; '
        'PYTHONPATH=$T:$PYTHONPATH "$@"',
        torch=True,
    ),
    Fault(
        "torch does not import",
        "torch_build",
        "libcudart",
        'mkdir -p $T/torch; echo "raise ImportError(\\"libcudart.so.12: cannot open\\")" >$T/torch/__init__.py; '
        'PYTHONPATH=$T:$PYTHONPATH "$@"',
        torch=True,
    ),
    Fault(
        "ranks do not meet on gloo's interface",
        "collective",
        "with GLOO_SOCKET_IFNAME=eth9",
        env={"GLOO_SOCKET_IFNAME": "eth9"},
        torch=True,
        fixes="export GLOO_SOCKET_IFNAME=lo",
    ),
)


@dataclass(frozen=True)
class Seen:
    """A line of the record. others: what else was an alarm, which a fault may well cause."""

    fault: str
    check: str
    named: bool
    status: str
    why: str
    fix: str
    machines: int
    quick: bool
    seconds: float
    others: tuple[str, ...]


def plant(fault: Fault) -> Seen:
    line = [*DOCTOR, *fault.options, *([] if fault.torch else ["--quick"])]
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        variables = clean() | {"T": folder} | dict(fault.env)
        done = subprocess.run(["sh", "-c", fault.shell, "sh", *line], capture_output=True, text=True, env=variables)
    for group in ("cpu", "memory"):
        with suppress(OSError):
            Path(f"/sys/fs/cgroup/{group}/samestep-doctor").rmdir()
    took = time.monotonic() - began
    return seen(fault.name, fault.check, fault.says, fault.fixes, [done.stdout], 1, not fault.torch, took, done.stderr)


def clean() -> dict[str, str]:
    """This environment, without what a healthy machine would not have set."""
    begins = ("NCCL_", "GLOO_", "TORCH_", "SLURM_")
    left = {"OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "VIRTUAL_ENV"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(begins) and name not in left}
    return kept | {"PYTHONPATH": str(SOURCE)}


def seen(
    name: str,
    check: str,
    says: str,
    fixes: str,
    printed: Sequence[str],
    machines: int,
    quick: bool,
    took: float,
    errors: str = "",
) -> Seen:
    """Looks for the finding in what the machines printed."""
    findings = []
    for text in printed:
        with suppress(ValueError):
            findings += json.loads(text[text.index("{") :])["findings"]
    alarms = [each for each in findings if each["status"] in ALARMS]
    found = [each for each in alarms if each["check"] == check and says in each["why"] and fixes in each["fix"]]
    others = tuple(f"{each['check']}: {each['why']}" for each in alarms if each not in found)
    first = found[0] if found else {"status": "", "why": errors.strip()[-300:], "fix": ""}
    status, why, fix = first["status"], first["why"], first["fix"]
    return Seen(name, check, bool(found), status, why, fix, machines, quick, round(took, 1), others)


# -- several machines --

Between = Callable[[int], Sequence[str]]


def doctors(
    hosts: Hosts,
    *,
    on: Sequence[int] = (0, 1),
    more: Between = lambda _: (),
    before: Between = lambda _: (),
    variables: Mapping[int, Mapping[str, str]] | None = None,
    folders: Mapping[int, str] | None = None,
    quick: bool = True,
    master: str = "h0",
    nnodes: int = 0,
) -> list[str]:
    """Types the same line on each host; returns what each printed. before: words that run the doctor."""
    started = []
    shape = ["--nnodes", str(nnodes or len(on)), "--nproc", "1", "--master-addr", master, "--timeout", "12"]
    shape = shape if quick else [*shape[:-1], "90"]
    for host in on:
        line = [*before(host), *DOCTOR, *shape, *(["--quick"] if quick else []), *more(host)]
        own = clean() | dict((variables or {}).get(host, {}))
        where = (folders or {}).get(host)
        started.append(hosts.start(host, line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=own, cwd=where))
    return [process.communicate()[0] for process in started]


def between_hosts(folder: Path) -> Iterator[tuple[str, str, str, str, bool, Callable[[], list[str]]]]:
    """Yields (name, check, says, fixes, quick, how to run it) with the fault in place."""
    with Hosts(3) as hosts:
        spaces = [f"{hosts._tag}-{n}" for n in range(3)]
        two: Callable[[], list[str]] = lambda: doctors(hosts)  # noqa: E731
        yield from of_the_network(hosts, spaces, two)
        yield from of_one_machine(hosts, spaces, folder)


def of_the_network(
    hosts: Hosts, spaces: Sequence[str], two: Callable[[], list[str]]
) -> Iterator[tuple[str, str, str, str, bool, Callable[[], list[str]]]]:
    with shaped(spaces[1], "eth0", "300mbit"):
        yield "a link is slow one way", "links", "from h1 to h0 is slow", "", True, two
    with shaped(spaces[1], "eth0", "100mbit"), shaped(f"{hosts._tag}-sw", "p1", "100mbit"):
        yield "a link of 100 Mbit/s", "links", "Mbit/s back", "", True, two
        three = lambda: doctors(hosts, on=(0, 1, 2))  # noqa: E731
        yield "the one slow machine of three", "links", "the link of h1 is slow", "", True, three
    hosts.cut(1)
    yield "a link is cut", "master", "not reached", "", True, two
    hosts.mend(1)
    time.sleep(1)
    yield "the first machine does not listen", "master", "refused", "", True, lambda: doctors(hosts, on=(1,), nnodes=2)
    yield "a machine is missing", "machines", "1 of 2 machines", "", True, lambda: doctors(hosts, on=(0,), nnodes=2)
    with rule(spaces[0], "ipproto tcp sport 29500 blackhole"):
        yield "the port is dropped", "master", "nothing answers", "--dport 29500", True, two
    with rule(spaces[1], "ipproto tcp sport 32768-60999 dport 32768-60999 blackhole"):
        yield "random ports are dropped", "reachability", "h0 does not reach port", "", True, two
    for port in ("p1", "p2"):
        bridge(f"{hosts._tag}-sw", port, "on")
    three = lambda: doctors(hosts, on=(0, 1, 2))  # noqa: E731
    yield "two of three do not reach each other", "reachability", "h1 does not reach", "", True, three
    for port in ("p1", "p2"):
        bridge(f"{hosts._tag}-sw", port, "off")
    ip(f"-n {spaces[1]} link set eth0 mtu 9000")
    yield "another MTU", "mtu", "9000", "mtu 1500", True, two
    ip(f"-n {spaces[1]} link set eth0 mtu 1500")


def of_one_machine(
    hosts: Hosts, spaces: Sequence[str], folder: Path
) -> Iterator[tuple[str, str, str, str, bool, Callable[[], list[str]]]]:
    number = lambda host: ["--node-rank", str(min(host, 1))]  # noqa: E731
    run = lambda **how: lambda: doctors(hosts, **how)  # noqa: E731
    yield "a node rank twice", "machines", "both have --node-rank 1", "", True, run(on=(0, 1, 2), more=number)
    shape = lambda host: ["--nnodes", str(2 + host)]  # noqa: E731
    yield "another --nnodes", "machines", "--nnodes is not the same", "", True, run(more=shape)
    shutil.copytree(SOURCE, folder / "src")
    with open(folder / "src" / "samestep" / "version.py", "a") as file:
        file.write("# another\n")
    other = {1: {"PYTHONPATH": str(folder / "src")}}
    yield "another samestep", "versions", "samestep is not the same", "", True, run(variables=other)
    for host in (0, 1):
        (folder / str(host)).mkdir()
        (folder / str(host) / "my_job.py").write_text(f"rows = {host}\n")
    own = {host: str(folder / str(host)) for host in (0, 1)}
    mine = lambda _: ["my_job.py"]  # noqa: E731
    yield "another job file", "versions", "the job's file", "", True, run(folders=own, more=mine)
    (folder / "skew.c").write_text(SKEW)
    line = ["gcc", "-shared", "-fPIC", "-o", str(folder / "skew.so"), str(folder / "skew.c"), "-ldl"]
    subprocess.run(line, check=True)
    late = {1: {"LD_PRELOAD": str(folder / "skew.so")}}
    yield "a clock 90 s ahead", "clock", "90.0 s ahead", "", True, run(variables=late)
    for host in (0, 1):
        lines = [f"127.0.1.1 h{host}", "127.0.0.1 localhost", *([f"{hosts.address(0)} h0"] if host else [])]
        (folder / f"hosts{host}").write_text("\n".join(lines) + "\n")
    bind = lambda host: ["sh", "-c", f'mount --bind {folder}/hosts{host} /etc/hosts; exec "$@"', "sh"]  # noqa: E731
    second = lambda host: bind(1) if host else []  # noqa: E731
    yield "a hostname of 127.0.1.1", "hostname", "127.0.1.1", "IFNAME=eth0", True, run(before=second)
    first = lambda host: [] if host else bind(0)  # noqa: E731
    yield "the master of 127.0.1.1", "master", "127.0.1.1", "", True, run(before=first)
    yield "the master's name is unknown", "master", "unknown on h1", "", True, run(on=(1,), nnodes=2, master="h7")
    loop = {1: {"GLOO_SOCKET_IFNAME": "lo"}}
    yield "gloo uses lo", "interfaces", "no other machine", "IFNAME=eth0", True, run(variables=loop)
    some = {1: {"NCCL_ALGO": "Ring"}}
    yield "NCCL_ALGO on one machine", "variables", "not the same on all", "", True, run(variables=some)
    for space in spaces[:2]:
        ip(f"-n {space} link add docker0 type bridge")
        ip(f"-n {space} addr add 172.17.0.1/16 dev docker0")
        ip(f"-n {space} link set docker0 up")
    docker = {host: {"GLOO_SOCKET_IFNAME": "docker0"} for host in (0, 1)}
    yield "gloo uses docker0", "interfaces", "no other machine", "IFNAME=eth0", True, run(variables=docker)
    tried = run(variables=docker, quick=False)
    yield "ranks do not meet over docker0", "collective", "docker0", "export GLOO_SOCKET_IFNAME=eth0", False, tried
    slow = grouped("cpu", "cpu.cfs_quota_us=25000")
    limited = lambda host: ["sh", "-c", slow, "sh"] if host else []  # noqa: E731
    yield "a straggler", "collective", "rank 1 is a straggler", "", False, run(before=limited, quick=False)
    with suppress(OSError):
        Path("/sys/fs/cgroup/cpu/samestep-doctor").rmdir()


@contextmanager
def shaped(space: str, device: str, rate: str) -> Iterator[None]:
    tc(f"-n {space} qdisc replace dev {device} root handle 1: htb default 1")
    tc(f"-n {space} class replace dev {device} parent 1: classid 1:1 htb rate {rate} burst 64kb")
    yield
    tc(f"-n {space} qdisc del dev {device} root")


@contextmanager
def rule(space: str, words: str) -> Iterator[None]:
    ip(f"-n {space} rule add pref 1 {words}")
    yield
    ip(f"-n {space} rule del pref 1")


def bridge(space: str, port: str, state: str) -> None:
    subprocess.run(["ip", "netns", "exec", space, "bridge", "link", "set", "dev", port, "isolated", state], check=True)


def healthy(number: int, quick: bool, machines: int) -> Seen:
    began = time.monotonic()
    if machines == 1:
        line = [*DOCTOR, *(["--quick"] if quick else [])]
        printed = [subprocess.run(line, capture_output=True, text=True, env=clean()).stdout]
    else:
        with Hosts(machines) as hosts:
            printed = doctors(hosts, quick=quick)
    result = seen(f"healthy {number}", "", "no such words", "", printed, machines, quick, time.monotonic() - began)
    reported = any('"findings"' in text for text in printed)
    return Seen(**{**asdict(result), "named": reported and not result.others, "others": result.others})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="faults whose names have these words")
    parser.add_argument("--torch", choices=["with", "without", "alone"], default="with")
    parser.add_argument("--healthy", type=int, default=20)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    rows = []
    wanted = {"with": (True, False), "without": (True,), "alone": (False,)}[given.torch]

    def keep(row: Seen) -> None:
        rows.append(row)
        with open(given.out / "trials.jsonl", "a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        print(
            "ok  " if row.named else "MISS",
            f"{row.seconds:6.1f} s",
            row.fault,
            "|",
            row.why[:150],
            *row.others,
            flush=True,
        )

    for fault in FAULTS:
        if given.only in fault.name and (not fault.torch) in wanted:
            keep(plant(fault))
    with tempfile.TemporaryDirectory() as folder:
        for name, check, says, fixes, quick, run in between_hosts(Path(folder)):
            if given.only in name and quick in wanted:
                began = time.monotonic()
                printed = run()
                keep(seen(name, check, says, fixes, printed, len(printed), quick, time.monotonic() - began))
    for number in range(given.healthy):
        keep(healthy(number, wanted[-1], 2 if number % 5 == 4 else 1))
    missed = [row.fault for row in rows if not row.named]
    print(f"{len(rows) - len(missed)} of {len(rows)} as they should be", missed)
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
