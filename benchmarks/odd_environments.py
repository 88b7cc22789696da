"""The odd environments of bad_inputs.py: in each, a command works, or is refused with one sentence."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping

from bad_input_table import FAILED, QUICK, REFUSED, WORKS, Case

VERIFY = "SAMESTEP verify quick.py --engine ddp --nproc 2"
FORKED_RUN = "SAMESTEP run quick.py --engine single --nproc 1 --launcher fork"
RUN = "SAMESTEP run quick.py --engine single --nproc 1"
LOOK = "SAMESTEP eject quick.py"  # one worker, which loads the job
ENGINES = "SAMESTEP engines"
HELP = "SAMESTEP --help"
EITHER = (WORKS, REFUSED)
LONG = "d" * 120
# What samestep reads itself, also in a worker that is forked.
OWN = ("RANK", "WORLD", "LOCAL", "MASTER", "SLURM", "OMPI", "PMI", "SAMESTEP", "OMP", "CUDA", "COLUMNS", "TERM", "NO_")
OWN += ("FORCE", "LINES", "GLOO", "TORCHELASTIC", "PYTEST", "USER", "SOURCE", "http")


def environments() -> Iterator[Case]:
    if ROOT and shutil.which("unshare") and shutil.which("setpriv"):
        yield from _namespaces()
        yield from _users()
    yield from _limits()
    yield from _streams()
    yield from _places()
    yield from _dry_runs()
    yield from _variables()


def _case(name: str, shell: str, codes: tuple[int, ...] = (WORKS,), **more: object) -> Case:
    return Case("environment", name, shell, codes, **{"forked": False, **more})  # type: ignore[arg-type]


VARIABLES: dict[str, tuple[tuple[str, ...], str, tuple[int, ...]]] = {
    "LC_ALL": (("C", "nonsense"), LOOK, (WORKS,)),
    "COLUMNS": (("1", "1000000", "x"), ENGINES, (WORKS,)),
    "NO_COLOR": (("1",), ENGINES, (WORKS,)),
    "FORCE_COLOR": (("1",), ENGINES, (WORKS,)),
    "TERM": (("dumb",), ENGINES, (WORKS,)),
    "OMP_NUM_THREADS": (("x", "0", "-1", "99999999999999999999"), FORKED_RUN, EITHER),
    "CUDA_VISIBLE_DEVICES": (("x", "", "GPU-nope"), FORKED_RUN, (WORKS,)),
    "RANK": (("0", "x"), FORKED_RUN, EITHER),
    "WORLD_SIZE": (("2", "x", "0", "-1"), "SAMESTEP run quick.py --engine single", EITHER),
    "LOCAL_RANK": (("0", "x"), FORKED_RUN, EITHER),
    "MASTER_ADDR": (("nonsense", "-x"), VERIFY, (WORKS,)),
    "MASTER_PORT": (("x", "99999999"), VERIFY, EITHER),
    "SLURM_JOB_ID": (("1", "x"), FORKED_RUN, (WORKS,)),
    "SLURM_NTASKS": (("2", "x"), FORKED_RUN, EITHER),
    "SLURM_PROCID": (("0", "x"), FORKED_RUN, EITHER),
    "SLURM_JOB_NUM_NODES": (("2", "x"), FORKED_RUN, EITHER),
    "OMPI_COMM_WORLD_SIZE": (("2", "x"), "SAMESTEP run quick.py --engine single", EITHER),
    "OMPI_COMM_WORLD_RANK": (("0", "x"), FORKED_RUN, EITHER),
    "PMI_RANK": (("0", "x"), FORKED_RUN, EITHER),
    "PYTHONPATH": (("/nowhere:::x", "quick.py"), LOOK, (WORKS,)),
    "PYTHONOPTIMIZE": (("2",), VERIFY, (WORKS,)),
    "PYTHONWARNINGS": (("error",), VERIFY, (WORKS,)),
    "PYTHONHASHSEED": (("0",), LOOK, (WORKS,)),
    "PYTHONDONTWRITEBYTECODE": (("1",), LOOK, (WORKS,)),
    "PYTHONDEVMODE": (("1",), LOOK, (WORKS,)),
    "PYTHONVERBOSE": (("1",), HELP, (WORKS,)),
    "PYTHONIOENCODING": (("ascii", "utf-16"), LOOK, (WORKS,)),
    "PYTHONUTF8": (("0",), LOOK, (WORKS,)),
    "PYTHONPYCACHEPREFIX": (("/nowhere",), LOOK, (WORKS,)),
    "PYTHONMALLOC": (("debug",), ENGINES, (WORKS,)),
    "TORCH_DISTRIBUTED_DEBUG": (("DETAIL",), VERIFY, (WORKS,)),
    "TORCH_SHOW_CPP_STACKTRACES": (("1",), LOOK, (WORKS,)),
    "TORCH_CPP_LOG_LEVEL": (("x",), LOOK, (WORKS,)),
    "TORCH_LOGS": (("+dynamo",), LOOK, (WORKS,)),
    "TORCH_NCCL_BLOCKING_WAIT": (("x",), LOOK, (WORKS,)),
    "GLOO_SOCKET_IFNAME": (("nope0", ""), VERIFY, EITHER),
    "NCCL_SOCKET_IFNAME": (("nope0",), LOOK, (WORKS,)),
    "TZ": (("nonsense",), LOOK, (WORKS,)),
    "HOME": (("/nowhere",), VERIFY, (WORKS,)),
    "XDG_RUNTIME_DIR": (("/nowhere",), LOOK, (WORKS,)),
    "TMPDIR": (("/nowhere", "relative"), VERIFY, EITHER),
    "PATH": (("/nowhere",), LOOK, (WORKS,)),
    "LD_PRELOAD": (("/nowhere.so",), LOOK, (WORKS,)),
    "USER": (("\x1b[31m",), FORKED_RUN, (WORKS,)),
    "http_proxy": (("http://127.0.0.1:9",), VERIFY, (WORKS,)),
    "PYTEST_XDIST_WORKER": (("gw0",), FORKED_RUN, (WORKS,)),
    "TORCHELASTIC_RESTART_COUNT": (("x", "3"), FORKED_RUN, EITHER),
    "TORCHELASTIC_RUN_ID": (("x",), FORKED_RUN, EITHER),
    "SAMESTEP_ATTEMPT": (("x", "-1"), FORKED_RUN, EITHER),
    "SAMESTEP_COMMAND": (("x", "1", "", "1 2 3"), FORKED_RUN, EITHER),
    "SAMESTEP_DEVICES": (("x", ""), FORKED_RUN, EITHER),
    "SAMESTEP_FORK_SERVERS": (("/nowhere", "", "quick.py", "."), FORKED_RUN, EITHER),
    "SAMESTEP_INIT_METHOD": (("x", "tcp://", "file://"), VERIFY, EITHER),
    "SAMESTEP_RANK_VARIABLES": (("x", "", "a,b"), FORKED_RUN, EITHER),
    "SAMESTEP_RUN": (("x", "../x"), VERIFY, EITHER),
    "SAMESTEP_SAVE_VARIABLES": (("NOPE", "", "HOME"), FORKED_RUN, EITHER),
    "SAMESTEP_TIMEOUT_S": (("x", "-1", "nan", "1e400"), VERIFY, EITHER),
    "SAMESTEP_CHECK_PLAN": (("x", "/nowhere"), FORKED_RUN, EITHER),
    "SAMESTEP_CHECK_SCRIPT": (("x",), "SAMESTEP check --deadline 60 quick.py", (FAILED, REFUSED)),
    "SAMESTEP_CHECK_LAUNCHERS": (("x",), "SAMESTEP check --deadline 60 quick.py", (FAILED, REFUSED)),
    "SAMESTEP_CHECK_PYTHONPATH": (("x",), "SAMESTEP check --deadline 60 quick.py", (FAILED, REFUSED)),
}


def _variables() -> Iterator[Case]:
    for name, (values, shell, codes) in VARIABLES.items():
        for value in values:
            # bash itself needs a PATH
            line = f"export PATH={value!r}; {shell}" if name == "PATH" else shell
            env = {} if name == "PATH" else {name: value}
            quiet = name not in ("PYTHONVERBOSE", "LD_PRELOAD", "PYTHONWARNINGS", "PYTHONDEVMODE", "LC_ALL")
            yield _case(f"{name}={value!r}", line, codes, env=env, judge_lines=quiet, forked=name.startswith(OWN))
    together: dict[str, tuple[Mapping[str, str], tuple[int, ...]]] = {
        "torchrun's left over": (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"},
            EITHER,
        ),
        "rank above the world": (
            {"RANK": "5", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            (REFUSED,),
        ),
        "a world of one": ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, (WORKS,)),
        "slurm's batch script": ({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "h1", "SLURM_NTASKS": "1"}, EITHER),
        "slurm's in half": ({"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0"}, EITHER),
        "mpi's in half": ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, EITHER),
        "mpi against torchrun": (
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "RANK": "0", "WORLD_SIZE": "4"},
            EITHER,
        ),
        "all of SLURM_": ({f"SLURM_{name}": "x" for name in ("NTASKS", "PROCID", "NNODES", "LOCALID")}, EITHER),
    }
    for name, (env, codes) in together.items():
        yield _case(name, "SAMESTEP run quick.py --engine single", codes, env=env, forked=True)
    yield _case("PYTHONHASHSEED=x", RUN, (FAILED,), env={"PYTHONHASHSEED": "x"}, judge_lines=False)
    yield _case("HOME unset", VERIFY, unset=("HOME",))
    yield _case("an empty environment", f"env -i {RUN}")
    yield _case("TMPDIR long", f"mkdir -p {LONG}; TMPDIR=$PWD/{LONG} {VERIFY}")
    yield _case("TMPDIR very long", f"mkdir -p {LONG}/{LONG}; TMPDIR=$PWD/{LONG}/{LONG} {VERIFY}", EITHER)
    yield _case("TMPDIR read-only", f"mkdir ro; chmod 555 ro; TMPDIR=$PWD/ro {AS_READER} {RUN}", EITHER, changes=True)
    yield _case("TMPDIR with spaces", f"mkdir 'a b'; TMPDIR=\"$PWD/a b\" {VERIFY}")


AS_USER = "setpriv --reuid 12345 --regid 12345 --clear-groups"
# The interpreter may lie in a folder of root's: this one may search and read, and not write.
AS_READER = f"{AS_USER} --inh-caps +dac_read_search --ambient-caps +dac_read_search"
ROOT = os.geteuid() == 0


def _streams() -> Iterator[Case]:
    yield _case("stdin closed", f"{LOOK} <&-")
    yield _case("stdout closed", f"{LOOK} >&-")
    yield _case("stderr closed", f"{LOOK} 2>&-")
    yield _case("all closed", f"{LOOK} <&- >&- 2>&-")
    yield _case("closed, verify", f"{VERIFY} <&- >&- 2>&-")
    yield _case("json to nobody", f"{ENGINES} --json >&-")
    yield _case("a pipe that closes", f"set -o pipefail; {ENGINES} | head -1")
    yield _case("a pipe that closes, help", f"set -o pipefail; {HELP} | true")
    yield _case("stdout full", f"{ENGINES} > /dev/full", EITHER)
    yield _case("help to a full disk", f"{HELP} > /dev/full", EITHER)
    yield _case("stderr full", f"{LOOK} 2> /dev/full")
    yield _case("stdin a terminal's noise", f"yes | {LOOK}")


def _limits() -> Iterator[Case]:
    for limit, line in {
        "n 64": VERIFY,
        "n 20": LOOK,
        "n 8": LOOK,
        "f 100": RUN,
        "f 1": LOOK,
        "v 200000": LOOK,
        "v 1000000": LOOK,
        "s 256": LOOK,
        "c 0": LOOK,
        "t 3": LOOK,
        "l 0": LOOK,
    }.items():
        codes = EITHER if limit in ("f 100", "c 0", "l 0") else (WORKS, FAILED, REFUSED)
        yield _case(
            f"ulimit -{limit}", f"ulimit -{limit}; {line}", codes, changes=True, judge_lines=limit[0] not in "t"
        )
    yield _case("umask 077", f"umask 077; {VERIFY}")
    yield _case("umask 777", f"umask 777; {RUN}", EITHER, changes=True)
    yield _case("umask 000", f"umask 000; {RUN}")
    yield _case("nice 19", f"nice -n 19 {LOOK}")
    yield _case("one core", f"taskset -c 0 {VERIFY}")
    yield _case("nohup", f"nohup {LOOK}")
    yield _case("in the background", f"({LOOK}) & wait $!")
    yield _case("SIGCHLD ignored", f"trap '' CHLD; {LOOK}")
    yield _case("SIGPIPE ignored", f"trap '' PIPE; {LOOK}")
    yield _case("SIGINT ignored", f"trap '' INT; {LOOK}")
    yield _case("no git, no ps", f"export PATH=$PWD/bin; {RUN}", files={"quick.py": QUICK, "bin/x": ""})


def _namespaces() -> Iterator[Case]:
    full = "mkdir t; mount -t tmpfs -o size=16k none t; head -c 1M /dev/zero > t/full 2> /dev/null"
    private = "unshare -m bash -c"
    yield _case("loopback down", f"unshare -n {VERIFY}", EITHER)
    yield _case(
        "loopback down, run", "unshare -n SAMESTEP run quick.py --engine ddp --nproc 2 --launcher spawn", EITHER
    )
    yield _case("loopback down, doctor", "unshare -n SAMESTEP doctor --quick", (WORKS, FAILED))
    yield _case("another host name", f"unshare -u bash -c 'hostname no-such-name.invalid; {VERIFY}'")
    yield _case("no /dev/shm", f"{private} 'mount -t tmpfs -o size=1k none /dev/shm; {VERIFY}'")
    yield _case("TMPDIR full", f"{private} '{full}; TMPDIR=$PWD/t {VERIFY}'", EITHER, changes=True)
    yield _case("--out full", f"{private} '{full}; {RUN} --out t/out'", changes=True, codes=EITHER)
    yield _case("read-only folder", f"{private} 'mount -o bind,ro . . && cd $PWD && {RUN}'", (REFUSED,))
    yield _case("no /proc", f"{private} 'mount -t tmpfs none /proc; {LOOK}'", (WORKS, FAILED, REFUSED), changes=True)
    yield _case("no /sys", f"{private} 'mount -t tmpfs none /sys; {LOOK}'")
    yield _case("a pid namespace", f"unshare -p -f --mount-proc {VERIFY}")
    yield _case("the clock of 1970", f"unshare -T --boottime 1 --monotonic 1 {LOOK}")


def _users() -> Iterator[Case]:
    yield _case("no passwd entry", f"chmod 777 .; {AS_READER} {VERIFY}")
    yield _case("no passwd entry, no HOME", f"chmod 777 .; unset HOME; {AS_READER} {LOOK}")
    yield _case("folder of another user", f"chmod 755 .; {AS_READER} {RUN}", (REFUSED,))
    yield _case(
        "--out of another user", f"mkdir -m 700 o; chmod 755 .; {AS_READER} {RUN} --out o", (REFUSED,), changes=True
    )
    yield _case(
        "--out below another's", f"mkdir -m 700 o; chmod 755 .; {AS_READER} {RUN} --out o/p", (REFUSED,), changes=True
    )
    yield _case("job of another user", f"chmod 755 .; chmod 000 quick.py; {AS_USER} {RUN}", (REFUSED,), changes=True)
    yield _case(
        "job in a shut folder",
        f"mkdir s; mv quick.py s; chmod 755 .; chmod 000 s; {AS_USER} SAMESTEP run s/quick.py",
        (REFUSED,),
        changes=True,
    )
    yield _case(
        "weights of another user",
        f"touch w; chmod 000 w; {AS_USER} SAMESTEP evaluate --weights w quick.py",
        (REFUSED,),
        changes=True,
    )
    yield _case(
        "runs of another user", f"mkdir -m 700 o; chmod 755 .; {AS_USER} SAMESTEP runs o", (REFUSED,), changes=True
    )
    yield _case("no capabilities", f"setpriv --bounding-set=-all --inh-caps=-all {LOOK}")
    yield _case(
        "ulimit -u 20",
        f"chmod 777 .; {AS_READER} bash -c 'ulimit -u 20; {VERIFY}'",
        (WORKS, FAILED, REFUSED),
        changes=True,
        judge_lines=False,
    )


def _places() -> Iterator[Case]:
    yield _case("a folder with spaces", LOOK, folder="a b  c")
    yield _case("a folder with unicode", LOOK, folder="größe 訓練")
    yield _case("a folder with a newline", VERIFY, EITHER, folder="a\nb")
    yield _case("a folder with quotes", VERIFY, folder="a'b\"c$HOME`x`")
    yield _case("a folder with a percent", LOOK, folder="a%20b:c")
    yield _case(
        "a folder of bytes", f"mkdir $'\\xff\\xfe'; cp quick.py $'\\xff\\xfe'; cd $'\\xff\\xfe'; {VERIFY}", EITHER
    )
    yield _case("a long folder", LOOK, folder="f" * 200)
    yield _case("a folder like an option", LOOK, folder="--out")
    for name, line in {
        "run": RUN,
        "engines": ENGINES,
        "doctor": "SAMESTEP doctor --quick",
        "runs": "SAMESTEP runs",
    }.items():
        codes = (WORKS, FAILED, REFUSED)
        yield _case(
            f"folder removed, {name}",
            f"mkdir d; cd d; rmdir ../d; {line.replace('quick', '../quick')}",
            codes,
            changes=True,
        )
    yield _case("--out with a newline", f"{RUN} --out $'a\\nb'", EITHER)
    yield _case("--out with unicode", f"{RUN} --out größe", forked=True)
    yield _case("--out with escapes", f"{RUN} --out $'a\\x1b[31mb'", EITHER)
    yield _case("--out of bytes", f"{RUN} --out $'\\xff\\xfe'", EITHER)
    yield _case("--out like an option", f"{RUN} --out=-x")
    yield _case("a job with unicode", "mv quick.py größe.py; SAMESTEP eject größe.py")
    yield _case("a job with spaces", "mv quick.py 'a b.py'; SAMESTEP verify 'a b.py' --engine ddp --nproc 2")
    yield _case("a job with a dash", "mv quick.py my-job.py; SAMESTEP eject my-job.py")
    yield _case(
        "a job named torch", "mv quick.py torch.py; SAMESTEP run torch.py", (WORKS, FAILED, REFUSED), changes=True
    )
    yield _case("a job named as a keyword", "mv quick.py class.py; SAMESTEP eject class.py")
    yield _case("a job through a link", "mkdir d; mv quick.py d; ln -s d/quick.py q.py; SAMESTEP run q.py")
    yield _case("a job that warns", f"sed -i '1i import warnings; warnings.warn(\"x\")' quick.py; {VERIFY}")


def _dry_runs() -> Iterator[Case]:
    """Commands that only look: the folder is as before."""
    for line in (
        "--help",
        "run --help",
        "engines",
        "engines --json",
        "runs",
        "runs --json",
        "run quick.py --dry-run",
        "slurm quick.py --dry-run",
        "slurm quick.py --dry-run --out out",
        "run quick.py --to k8s --image i --claim c",
        "eject quick.py",
        "collectives --show all_reduce",
        "doctor --quick",
        "doctor quick.py",
    ):
        look = f"ls -laR > $TMPDIR/before; SAMESTEP {line} > $TMPDIR/printed; code=$?; ls -laR > $TMPDIR/after; "
        look += "diff $TMPDIR/before $TMPDIR/after >&2 || code=99; "
        look += "rm $TMPDIR/before $TMPDIR/after $TMPDIR/printed; exit $code"
        codes = (WORKS, FAILED) if line.startswith("doctor") else (REFUSED,) if line.startswith("runs") else (WORKS,)
        yield _case(f"looks only: {line}", look, codes)
