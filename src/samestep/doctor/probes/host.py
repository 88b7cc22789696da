"""Probes of the machine itself: its disks, its name, its clock and that of its processor."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from samestep.doctor.machine import LaunchInfo, Machine
from samestep.doctor.probe import GIB, MIB, Finding, FleetProbe, MachineProbe, fail, for_each, ok, quoted, unknown, warn
from samestep.message import Message, message
from samestep.world import network

CLOCK_SKEW_S, CLOCK_TRIES = 1.0, 5
WRITTEN_BYTES = 16 << 20
FILE_SIZE_FIX = "ulimit -f unlimited   # where it is refused: 'fsize' in /etc/security/limits.conf"
CPU_FILES = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Folder:
    """The disk of one folder.

    path: the folder, or the nearest one that exists. free: bytes. inodes: how many files it can still take; None:
    unknown. mib_s: of a file that is written and synced. error: why it takes no file; '' where it does.
    """

    path: str
    free: int
    inodes: int | None
    mib_s: float
    error: str


@dataclass(frozen=True)
class Disks:
    """The disks of --out and of temporary files, on one machine.

    refused: TMPDIR, where Python can write nothing into it and uses another folder; '' otherwise.
    """

    out: Folder
    temporary: Folder
    refused: str = ""


def try_disks(info: LaunchInfo) -> Disks:
    used, requested = tempfile.gettempdir(), os.environ.get("TMPDIR", "")
    refused = requested if requested and os.path.abspath(requested) != used else ""
    return Disks(_try_folder(Path(info.out)), _try_folder(Path(used), written=1 << 20), refused)


def _try_folder(folder: Path, written: int = WRITTEN_BYTES) -> Folder:
    path = folder.resolve()
    while not path.exists():
        path = path.parent
    free, inodes = 0, None
    try:
        free = psutil.disk_usage(str(path)).free
        inodes = os.statvfs(path).f_favail if os.statvfs(path).f_files else None
        with tempfile.TemporaryFile(dir=path) as file:
            began = time.monotonic()
            file.write(os.urandom(1 << 20) * (written >> 20))
            file.flush()
            os.fsync(file.fileno())
            took = time.monotonic() - began
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "")
        return Folder(str(path), free, inodes, mib_s=0.0, error=f"{name}: {error.strerror}")
    return Folder(str(path), free, inodes, mib_s=written / MIB / max(took, 1e-9), error="")


def judge_disks(disks: Disks) -> list[Finding]:
    findings = _judge_folder(disks.out, message("results_of_out"), "samestep run … --out /ANOTHER/DISK")
    if disks.temporary.path != disks.out.path:
        findings += _judge_folder(disks.temporary, message("temporary_files"), "export TMPDIR=/ANOTHER/DISK")
    if disks.refused:
        findings += warn(
            message("tmpdir_takes_no_file", refused=disks.refused, used=disks.temporary.path),
            f"mkdir -p {quoted(disks.refused)}   # or: export TMPDIR={quoted(disks.temporary.path)}",
        )
    free_gib, mib_s = disks.out.free / GIB, disks.out.mib_s
    return findings or ok(message("disk_has_room", folder=disks.out.path, free_gib=free_gib, mib_s=mib_s))


def _judge_folder(folder: Folder, content: Message, fix: str) -> list[Finding]:
    path, free_mib = folder.path, folder.free / MIB
    if folder.error.startswith("EFBIG"):
        return fail(message("disk_takes_no_large_file", folder=path, content=content), FILE_SIZE_FIX)
    if folder.error:
        return fail(message("disk_takes_no_file", folder=path, content=content, error=folder.error), fix)
    if folder.inodes is not None and folder.inodes < 1000:
        return fail(message("disk_has_no_inodes", folder=path, content=content, inodes=folder.inodes), fix)
    if folder.free < 100 * MIB:
        return fail(message("disk_has_no_room_for_weights", folder=path, content=content, free_mib=free_mib), fix)
    if folder.free < GIB:
        return warn(message("disk_has_little_room", folder=path, content=content, free_mib=free_mib), fix)
    if folder.mib_s < 2:
        return warn(message("disk_is_slow", folder=path, content=content, mib_s=folder.mib_s), fix)
    return []


@dataclass(frozen=True)
class Hostname:
    """The name of one machine: where GLOO_SOCKET_IFNAME is not set, gloo listens on the address that the name has.

    addresses: of the name; empty: unknown. local: all addresses of this machine. chosen: GLOO_SOCKET_IFNAME. route: the
    interface towards the master; '' without one.
    """

    name: str
    addresses: tuple[str, ...]
    local: tuple[str, ...]
    chosen: str
    route: str
    nnodes: int


def look_up_hostname(info: LaunchInfo) -> Hostname:
    name = socket.gethostname()
    try:
        addresses = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        addresses = []
    route = network.route_to(info.master)
    return Hostname(
        name=name,
        addresses=tuple(dict.fromkeys(addresses)),
        local=tuple(address for entries in network.interfaces().values() for address in entries),
        chosen=os.environ.get("GLOO_SOCKET_IFNAME", ""),
        route=route[0] if route else "",
        nnodes=info.nnodes,
    )


def judge_hostname(host: Hostname) -> list[Finding]:
    route = "" if host.route == "lo" and host.nnodes > 1 else host.route  # the master's name may be this machine's own
    export = f"export GLOO_SOCKET_IFNAME={quoted(route or ('lo' if host.nnodes == 1 else 'eth0'))}"
    name, addresses = host.name, host.addresses
    if host.chosen:
        return ok(message("hostname_is_not_used_by_gloo", name=name, addresses=addresses, chosen=host.chosen))
    if not addresses:
        return warn(message("hostname_is_unknown", name=name), export)
    loopback = [address for address in addresses if ipaddress.ip_address(address.partition("%")[0]).is_loopback]
    if host.nnodes > 1 and loopback:
        return warn(message("hostname_is_loopback", name=name, addresses=addresses), export)
    if not {*addresses} & {*host.local, *loopback}:
        return warn(message("hostname_is_of_another_machine", name=name, addresses=addresses), export)
    return ok(message("hostname_has_addresses", name=name, addresses=addresses))


@dataclass(frozen=True)
class ProcessorClocks:
    """The clocks of one machine's cores.

    now_mhz, greatest_mhz: of the slowest core; 0: unknown. throttled: how often the hottest core was, since the machine
    started; None: unknown. governors: of all cores.
    """

    now_mhz: float
    greatest_mhz: float
    throttled: int | None
    governors: tuple[str, ...]


def read_processor_clocks(info: LaunchInfo) -> ProcessorClocks:
    frequencies = []
    with suppress(OSError, NotImplementedError, AttributeError):
        frequencies = [core for core in psutil.cpu_freq(percpu=True) if core.max]
    slowest = min(frequencies, key=lambda core: core.current / core.max, default=None)
    counts = []
    for path in CPU_FILES.glob("cpu[0-9]*/thermal_throttle/core_throttle_count"):
        with suppress(OSError, ValueError):
            counts.append(int(path.read_text()))
    governors = set()
    for path in CPU_FILES.glob("cpu[0-9]*/cpufreq/scaling_governor"):
        with suppress(OSError):
            governors.add(path.read_text().strip())
    now, greatest = (slowest.current, slowest.max) if slowest else (0.0, 0.0)
    return ProcessorClocks(now, greatest, max(counts, default=None), tuple(sorted(governors)))


def judge_processor_clocks(clocks: ProcessorClocks) -> list[Finding]:
    findings, now, greatest = [], clocks.now_mhz, clocks.greatest_mhz
    if clocks.throttled:
        fix = "sensors; journalctl -k | grep -i thermal   # then see to its cooling"
        findings += warn(message("core_was_throttled", times=clocks.throttled), fix)
    if "powersave" in clocks.governors and greatest and now < 0.5 * greatest:
        why = message("core_is_slow_under_powersave", mhz=now, greatest_mhz=greatest)
        findings += warn(why, "cpupower frequency-set -g performance")
    if findings:
        return findings
    if clocks.throttled is None and not greatest:
        return unknown(message("processor_clock_is_not_reported"))
    return ok(message("processor_is_not_throttled", mhz=now if greatest else None, greatest_mhz=greatest or None))


@dataclass(frozen=True)
class Offset:
    """How far a machine's clock is from the first machine's.

    seconds: the machine's clock is ahead of the first one's. within_s: half of the fastest question and answer.
    """

    machine: str
    seconds: float
    within_s: float


@dataclass(frozen=True)
class Clocks:
    """The machines' clocks against the first one's: logs are compared by time; certificates and schedulers use it."""

    offsets: tuple[Offset, ...]


def measure_clocks(machines: Sequence[Machine], info: LaunchInfo) -> Clocks:
    return Clocks(tuple(_measure_offset(machine) for machine in machines[1:]))


def _measure_offset(machine: Machine) -> Offset:
    tries = []
    for _ in range(CLOCK_TRIES):
        began = time.time()
        answered = machine.now()
        ended = time.time()
        tries.append(Offset(machine.name, answered - (began + ended) / 2, (ended - began) / 2))
    return min(tries, key=lambda offset: offset.within_s)


def judge_clocks(clocks: Clocks) -> list[Finding]:
    findings = []
    for offset in clocks.offsets:
        seconds = abs(offset.seconds)
        if seconds - offset.within_s > CLOCK_SKEW_S:
            why = message("clock_is_ahead" if offset.seconds > 0 else "clock_is_behind", seconds=seconds)
            findings += warn(why, "timedatectl set-ntp true   # or: chronyc makestep", machine=offset.machine)
    if findings:
        return findings
    if not clocks.offsets:
        return ok(message("one_machine_has_one_clock"))
    return ok(message("clocks_agree", milliseconds=1000 * max(abs(offset.seconds) for offset in clocks.offsets)))


PROBES = (
    MachineProbe(name="disk", group="host", facts=Disks, gather=try_disks, judge=for_each(judge_disks)),
    MachineProbe(
        name="hostname", group="host", facts=Hostname, gather=look_up_hostname, judge=for_each(judge_hostname)
    ),
    MachineProbe(
        name="throttling",
        group="host",
        facts=ProcessorClocks,
        gather=read_processor_clocks,
        judge=for_each(judge_processor_clocks),
    ),
    FleetProbe(name="clock", group="host", facts=Clocks, gather=measure_clocks, judge=judge_clocks),
)
