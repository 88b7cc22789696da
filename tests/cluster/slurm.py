"""A Slurm of our own: munged, slurmctld on host h0, a slurmd on each of the others. Debian's slurm-wlm.

No systemd, no control groups, nothing outside its folder. Started and stopped by pid.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

from budget import budget, wait_until
from cluster import hosts as hosts_module
from cluster.hosts import PATH, Hosts

CONFIGURATION = """\
ClusterName=samestep
SlurmctldHost=h0(10.77.0.10)
AuthType=auth/munge
# how long a requeued job must wait before it starts again, too: 120 s unless told
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
MinJobAge=300
InactiveLimit=0
Waittime=0
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=100000
JobRequeue=1
"""


def missing() -> str | None:
    """Why no Slurm can be started here, or None."""
    absent = [tool for tool in ("munged", "slurmctld", "slurmd", "srun") if shutil.which(tool, path=PATH) is None]
    if absent:
        return f"{', '.join(absent)} not installed (apt install --no-install-recommends slurm-wlm munge)"
    return hosts_module.missing()


class Slurm:
    """A running cluster of `nodes` nodes h1, h2, …; h0 is where people log in."""

    def __init__(self, nodes: int = 2) -> None:
        self.nodes = nodes
        self.hosts = Hosts(nodes + 1)
        self.folder = Path(tempfile.mkdtemp(prefix="samestep-slurm-"))
        self.environment = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": PATH}
        self._daemons: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Slurm:
        try:
            self.hosts.__enter__()
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        folder = self.folder
        folder.chmod(0o755)
        for name in ("state", "munge", *(f"spool-h{i}" for i in range(1, self.nodes + 1))):
            (folder / name).mkdir()
        (folder / "munge").chmod(0o700)
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        nodes = [
            f"NodeName=h{i} NodeHostname=h{i} NodeAddr={self.hosts.address(i)} CPUs=4 Boards=1 SocketsPerBoard=1 "
            "CoresPerSocket=4 ThreadsPerCore=1 RealMemory=4000 State=UNKNOWN"
            for i in range(1, self.nodes + 1)
        ]
        partition = f"PartitionName=all Nodes=h[1-{self.nodes}] Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO"
        text = CONFIGURATION.format(folder=folder) + "\n".join([*nodes, partition, ""])
        (folder / "slurm.conf").write_text(text)
        # slurmd 22.05 wants to know a version of control groups even when it uses none: named, so nothing is probed.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        munge = ["munged", "--foreground", f"--key-file={key}", f"--socket={folder}/munge.socket", "--num-threads=2"]
        munge += [
            f"--pid-file={folder}/munge/pid",
            f"--log-file={folder}/munge/log",
            f"--seed-file={folder}/munge/seed",
        ]
        self._daemon(0, munge)
        wait_until((folder / "munge.socket").exists, "munged did not start")
        self._daemon(0, ["slurmctld", "-D", "-f", f"{folder}/slurm.conf"])
        for i in range(1, self.nodes + 1):
            self._daemon(i, ["slurmd", "-D", "-N", f"h{i}", "-f", f"{folder}/slurm.conf"])
        wait_until(
            lambda: self.run("sinfo", "-h", "-N", "-o", "%t").stdout.split() == ["idle"] * self.nodes,
            "the nodes are not idle",
            lambda: (folder / "slurmctld.log").read_text()[-2000:],
        )

    def _daemon(self, host: int, command: list[str]) -> None:
        said = open(self.folder / f"{Path(command[0]).name}-{host}.out", "w")  # noqa: SIM115 - the daemon's own
        self._daemons.append(
            self.hosts.start(host, command, env=self.environment, stdout=said, stderr=said, start_new_session=True)
        )

    def line(self, *command: str) -> list[str]:
        """The command line that runs `command` where people log in."""
        return self.hosts.line(0, command)

    def run(self, *command: str, imports: float = 100, **more: str) -> subprocess.CompletedProcess[str]:
        """Runs `command` where people log in. more: for its environment."""
        return subprocess.run(
            self.line(*command), env=self.environment | more, capture_output=True, text=True, timeout=budget(imports)
        )

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job, as in {'JobState': 'COMPLETED'}."""
        shown = self.run("scontrol", "show", "job", number, "-o").stdout
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def wait(self, number: str, *states: str, imports: float = 60) -> dict[str, str]:
        """Waits until a job is in one of `states`. imports: a budget."""

        def there() -> bool:
            return self.job(number).get("JobState") in states

        wait_until(there, f"job {number} is", lambda: self.job(number), imports=imports)
        return self.job(number)

    def __exit__(self, *_: object) -> None:
        with suppress(subprocess.TimeoutExpired):
            if self._daemons:
                self.run("scancel", "--signal=KILL", "-u", "root", imports=10)
        members = []
        for daemon in self._daemons:
            with suppress(psutil.NoSuchProcess):
                members += [psutil.Process(daemon.pid), *psutil.Process(daemon.pid).children(recursive=True)]
        for member in members:
            with suppress(psutil.NoSuchProcess):
                member.send_signal(signal.SIGTERM)
        _, left = psutil.wait_procs(members, timeout=budget(5))
        for member in left:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        for daemon in self._daemons:
            daemon.wait()
        # Slurm's steps outlive its daemons by design; whatever still is on the hosts ends with them.
        self.hosts.down()
        shutil.rmtree(self.folder, ignore_errors=True)
