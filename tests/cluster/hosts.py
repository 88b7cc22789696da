"""Several hosts on one machine: each has its own network, hostname and /etc/hosts; a switch joins them.

The machine's own network is not touched. Needs root and iproute2. Everything is removed by `down`, by pid and by name
of namespace.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

NUMBERS = count()
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


def missing() -> str | None:
    """Why no hosts can be made here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in ("ip", "tc", "nsenter", "unshare") if shutil.which(tool, path=PATH) is None]
    return f"{', '.join(absent)} not installed (apt install iproute2 util-linux)" if absent else None


class Hosts:
    """`count` hosts h0, h1, … at 10.77.0.10, .11, … and fd77::10, fd77::11, …"""

    def __init__(self, count: int) -> None:
        self.count = count
        self._tag = f"ss{os.getpid()}-{next(NUMBERS)}"  # a test may have others in the same process
        self._folder = Path(tempfile.mkdtemp(prefix="samestep-hosts-"))
        self._made: list[str] = []

    def __enter__(self) -> Hosts:
        try:
            self._up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def address(self, host: int) -> str:
        return f"10.77.0.1{host}"

    def address6(self, host: int) -> str:
        return f"fd77::1{host}"

    def _up(self) -> None:
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        lines += [f"{self.address(i)} h{i}\n{self.address6(i)} six{i}" for i in range(self.count)]
        (self._folder / "hosts").write_text("\n".join(lines) + "\n")
        switch = self._namespace("sw")
        ip(f"-n {switch} link add br0 type bridge")
        ip(f"-n {switch} link set br0 up")
        for i in range(self.count):
            own = self._namespace(str(i))
            ip(f"-n {own} link set lo up")
            ip(f"-n {own} link add eth0 type veth peer name p{i} netns {switch}")
            ip(f"-n {switch} link set p{i} master br0 up")
            ip(f"-n {own} addr add {self.address(i)}/24 dev eth0")
            ip(f"-n {own} addr add {self.address6(i)}/64 dev eth0 nodad")
            ip(f"-n {own} link set eth0 up")

    def _namespace(self, name: str) -> str:
        full = f"{self._tag}-{name}"
        ip(f"netns add {full}")
        self._made.append(full)
        return full

    def line(self, host: int, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on a host. Not `ip netns exec`, which mounts /sys anew."""
        # No name server either: each look-up would wait for one that cannot be reached.
        inside = (
            'hostname "h$1"; mount --bind "$2" /etc/hosts; mount --bind /dev/null /etc/resolv.conf; shift 2; exec "$@"'
        )
        enter = ["nsenter", f"--net=/run/netns/{self._tag}-{host}", "unshare", "-m", "-u"]
        return [*enter, "sh", "-c", inside, "sh", str(host), str(self._folder / "hosts"), *command]

    def start(self, host: int, command: Sequence[str], **popen: object) -> subprocess.Popen[str]:
        """Starts `command` on a host."""
        return subprocess.Popen(self.line(host, command), text=True, **popen)  # type: ignore[call-overload,no-any-return]

    def shape(self, rate: str) -> None:
        """Gives every link `rate`, as in '100mbit', in and out (HTB)."""
        for i in range(self.count):
            for space, device in ((f"{self._tag}-{i}", "eth0"), (f"{self._tag}-sw", f"p{i}")):
                with suppress(subprocess.CalledProcessError):  # it has none at first
                    tc(f"-n {space} qdisc del dev {device} root")
                tc(f"-n {space} qdisc add dev {device} root handle 1: htb default 1")
                tc(f"-n {space} class replace dev {device} parent 1: classid 1:1 htb rate {rate} burst 64kb")

    def cut(self, host: int) -> None:
        """Takes the host's cable out of the switch; the host itself notices nothing."""
        ip(f"-n {self._tag}-sw link set p{host} down")

    def mend(self, host: int) -> None:
        ip(f"-n {self._tag}-sw link set p{host} up")

    def pids(self, host: int) -> list[int]:
        """The processes of a host."""
        return [int(pid) for pid in ip(f"netns pids {self._tag}-{host}").split()]

    def listening(self, host: int) -> list[str]:
        """The addresses and ports that a host listens at, as in '10.77.0.10:29500'."""
        shown = subprocess.run(
            ["nsenter", f"--net=/run/netns/{self._tag}-{host}", "ss", "-Hltn"],
            capture_output=True,
            text=True,
            check=True,
        )
        return [line.split()[3] for line in shown.stdout.splitlines()]

    def down(self) -> None:
        for name in self._made:
            with suppress(subprocess.CalledProcessError):
                for pid in ip(f"netns pids {name}").split():
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.1 if self._made else 0)
        for name in self._made:
            with suppress(subprocess.CalledProcessError):
                ip(f"netns del {name}")
        self._made = []
        shutil.rmtree(self._folder, ignore_errors=True)


def ip(arguments: str) -> str:
    return _run("ip", arguments)


def tc(arguments: str) -> str:
    return _run("tc", arguments)


def _run(tool: str, arguments: str) -> str:
    done = subprocess.run([tool, *arguments.split()], capture_output=True, text=True, env={"PATH": PATH})
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, f"{tool} {arguments}", done.stdout, done.stderr)
    return done.stdout
