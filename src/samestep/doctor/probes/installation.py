"""Probes of the installation: versions, the Python that runs, torch's build, the engines' packages, the encoding."""

from __future__ import annotations

import ast
import hashlib
import importlib
import locale
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from shutil import which

from samestep.doctor.machine import LaunchInfo
from samestep.doctor.probe import Finding, MachineProbe, differences, fail, for_each, ok, quoted, unknown, warn
from samestep.message import message
from samestep.version import __version__
from samestep.world import nvidia

PACKAGE = Path(__file__).parents[2]
MISSING = "missing"
SHADOWED = ("torch", "numpy", "random", "queue", "logging", "typing", "types", "signal", "socket", "select", "copy")
INSTALL = "https://pytorch.org/get-started/locally"


@dataclass(frozen=True)
class Versions:
    """The versions of packages and the job's file, on one machine; they must be the same on all.

    samestep: version and digest of its files. job: digest of the job's file; '' for a built-in job, MISSING for a file
    that is not there. nvidia: versions of the packages of CUDA and NCCL; '' without them.
    """

    python: str
    torch: str
    numpy: str
    samestep: str
    job: str
    nvidia: str


def read_versions(info: LaunchInfo) -> Versions:
    nccl = [f"{name} {version_of(name)}" for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13") if version_of(name)]
    return Versions(
        python=platform.python_version(),
        torch=version_of("torch"),
        numpy=version_of("numpy"),
        samestep=f"{__version__} {_digest(sorted(PACKAGE.rglob('*.py')))}",
        job=_digest_of_job(info.job),
        nvidia=", ".join(nccl),
    )


def version_of(package: str) -> str:
    """Returns the version of an installed package; '' where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _digest_of_job(name: str) -> str:
    job = Path(name.partition(":")[0])
    if job.is_file():
        return _digest([job])
    return MISSING if job.suffix == ".py" or len(job.parts) > 1 else ""


def _digest(files: list[Path]) -> str:
    state = hashlib.blake2b(digest_size=8)
    for path in files:
        state.update(path.read_bytes())
    return state.hexdigest()


def judge_versions(versions: Mapping[str, Versions]) -> list[Finding]:
    findings: list[Finding] = []
    for machine, installed in versions.items():
        if installed.job == MISSING:
            fix = "ls *.py   # from this folder: the job's path"
            findings += fail(message("job_file_is_missing"), fix, machine=machine)
    first = next(iter(versions.values()))
    same_torch = f"pip install {quoted(f'torch=={first.torch}')}"
    number, _, _ = first.samestep.partition(" ")
    same_samestep = f"pip install {quoted(f'samestep=={number}')}"
    must_agree: tuple[tuple[str, Callable[[Versions], str], str], ...] = (
        ("torch", lambda installed: installed.torch, same_torch),
        ("samestep", lambda installed: installed.samestep, same_samestep),
        ("NCCL", lambda installed: installed.nvidia, same_torch),
    )
    should_agree: tuple[tuple[str, Callable[[Versions], str], str], ...] = (
        ("Python", lambda installed: installed.python.rpartition(".")[0], "python3 -m venv .venv   # of one version"),
        ("numpy", lambda installed: installed.numpy, f"pip install {quoted(f'numpy=={first.numpy}')}"),
    )
    for name, value_of, fix in must_agree:
        if values := differences(versions, value_of):
            findings += fail(message("ranks_have_incompatible_versions", package=name, values=values), fix)
    if values := differences(versions, lambda installed: installed.job):
        fix = "scp JOB.py OTHER:   # the same file on each machine"
        findings += fail(message("job_files_differ_between_machines", values=values), fix)
    for name, value_of, fix in should_agree:
        if values := differences(versions, value_of):
            findings += warn(message("versions_differ_between_machines", package=name, values=values), fix)
    return findings or ok(message("versions_agree", python=first.python, torch=first.torch, samestep=first.samestep))


@dataclass(frozen=True)
class PythonEnvironment:
    """The Python environment of one machine.

    prefix: of the Python that runs. active: VIRTUAL_ENV or CONDA_PREFIX; '' without. torchrun: the one in PATH, as the
    prefix that it belongs to; '' where there is none. shadows: files of the working folder and of PYTHONPATH that hide
    a module.
    """

    prefix: str
    active: str
    torchrun: str
    shadows: tuple[str, ...]


def read_python_environment(info: LaunchInfo) -> PythonEnvironment:
    active = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX") or ""
    torchrun = which("torchrun")
    folders = [Path.cwd(), *(Path(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry)]
    shadows = [str(folder / f"{name}.py") for folder in folders for name in SHADOWED if _hides(folder, name)]
    return PythonEnvironment(
        prefix=str(Path(sys.prefix).resolve()),
        active=str(Path(active).resolve()) if active else "",
        torchrun=_prefix_of(Path(torchrun)) if torchrun else "",
        shadows=tuple(dict.fromkeys(shadows)),
    )


def _hides(folder: Path, name: str) -> bool:
    return (folder / f"{name}.py").exists() and not (folder / "os.py").exists()  # the standard library's own folder


def _prefix_of(script: Path) -> str:
    """Returns the prefix of the Python in a script's first line, or of the script's own folder."""
    try:
        line = script.read_bytes()[:200].split(b"\n")[0].decode(errors="replace")
    except OSError:
        line = ""
    interpreter = Path(line.removeprefix("#!").strip().split(" ")[0]) if line.startswith("#!/") else script
    inside = script if interpreter.name in ("env", "sh", "bash") else interpreter
    return str(inside.parent.parent.resolve())


def judge_python_environments(environments: Mapping[str, PythonEnvironment]) -> list[Finding]:
    findings = for_each(_judge_python_environment)(environments)
    if values := differences(environments, lambda environment: environment.prefix):
        prefix = next(iter(environments.values())).prefix
        fix = f"ln -s OTHER_PREFIX {quoted(prefix)}   # or one shared environment"
        findings += warn(message("python_prefix_differs_between_machines", values=values), fix)
    return findings


def _judge_python_environment(environment: PythonEnvironment) -> list[Finding]:
    findings, prefix, active = [], environment.prefix, environment.active
    if active and active != prefix:
        fix = f"source {quoted(f'{active}/bin/activate')} && hash -r   # or: deactivate"
        findings += warn(message("another_environment_is_active", active=active, prefix=prefix), fix)
    if environment.torchrun and environment.torchrun != prefix:
        why = message("torchrun_is_of_another_environment", torchrun=environment.torchrun, prefix=prefix)
        fix = f"export PATH={quoted(f'{prefix}/bin')}:$PATH   # or: python -m torch.distributed.run"
        findings += warn(why, fix)
    for path in environment.shadows:
        fix = f"mv {quoted(path)} {quoted(f'{path[:-3]}_.py')}"
        findings += warn(message("file_hides_module", file=path), fix)
    return findings or ok(message("python_is_of", prefix=prefix))


@dataclass(frozen=True)
class TorchBuild:
    """torch's build and what it finds, on one machine.

    error: why torch does not import; '' where it does. cuda: the version that torch was built for; '' for a build
    without. driver: NVIDIA's; '' without one. gpus: of the driver. usable: how many torch can use. visible: the text of
    CUDA_VISIBLE_DEVICES, None where it is not set. unsupported: GPUs that this build has no code for. wanted: --device.
    """

    error: str
    torch: str = ""
    cuda: str = ""
    driver: str = ""
    gpus: int = 0
    usable: int = 0
    visible: str | None = None
    unsupported: tuple[str, ...] = ()
    nccl: str = ""
    gloo: bool = True
    wanted: str = "auto"
    nproc: int = 1


def read_torch_build(info: LaunchInfo) -> TorchBuild:
    driver, gpus = "", 0
    with suppress(OSError):
        match = re.search(r"Kernel Module\D*(\d+[\d.]*)", (nvidia.DRIVER / "version").read_text())
        driver = match[1] if match else "unknown"
        gpus = nvidia.count()
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:
        return TorchBuild(_first_line(error), driver=driver, gpus=gpus)
    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    known = set(torch.cuda.get_arch_list()) if usable else set()
    unsupported = []
    for number in range(usable):
        major, minor = torch.cuda.get_device_capability(number)
        if not any(re.fullmatch(rf"(sm|compute)_{major}\d+\w?", name) for name in known):
            unsupported.append(f"{torch.cuda.get_device_name(number)} (sm_{major}{minor})")
    has_nccl = usable and dist.is_nccl_available()
    return TorchBuild(
        error="",
        torch=torch.__version__,
        cuda=torch.version.cuda or "",
        driver=driver,
        gpus=gpus,
        usable=usable,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        unsupported=tuple(unsupported),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "",
        gloo=dist.is_available() and dist.is_gloo_available(),
        wanted=info.device,
        nproc=info.nproc,
    )


def _first_line(error: BaseException) -> str:
    words = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {words}"[:300]


def judge_torch_build(build: TorchBuild) -> list[Finding]:
    if build.error:
        variable = re.search(r"value of ((?:TORCH|NCCL|GLOO)_[A-Z_]+)", build.error)
        fix = f"unset {variable[1]}" if variable else "pip install --force-reinstall --no-cache-dir torch"
        return fail(message("torch_does_not_import", error=build.error), fix)
    if not build.gloo:
        return fail(message("torch_has_no_gloo"), f"# another: {INSTALL}")
    if build.wanted.startswith("cuda") and not build.usable and not build.gpus:
        why = message("device_needs_a_gpu_driver", device=build.wanted, torch=build.torch)
        return fail(why, "samestep run … --device cpu")
    if not build.gpus or build.wanted == "cpu":
        return ok(message("torch_build_on_cpus", torch=build.torch, cuda=build.cuda or None))
    return _judge_torch_build_on_gpus(build)


def _judge_torch_build_on_gpus(build: TorchBuild) -> list[Finding]:
    gpus = message("gpus_of_machine", gpus=build.gpus, driver=build.driver)
    if not build.cuda:
        why = message("torch_is_built_without_cuda", machine=gpus, torch=build.torch)
        return fail(why, f"pip install torch   # see {INSTALL}")
    if not build.usable and build.visible is not None and not build.visible.strip("0123456789, "):
        why = message("cuda_visible_devices_hides_gpus", machine=gpus, value=build.visible)
        return fail(why, "unset CUDA_VISIBLE_DEVICES")
    if not build.usable:
        why = message("torch_uses_no_gpu", machine=gpus, torch=build.torch, cuda=build.cuda)
        return fail(why, f"nvidia-smi   # shows the driver's CUDA; then install torch for it: {INSTALL}")
    if build.visible is not None and build.nproc > build.usable:
        fields = {"value": build.visible, "usable": build.usable, "nproc": build.nproc}
        why = message("cuda_visible_devices_leaves_too_few_gpus", machine=gpus, **fields)
        return fail(why, f"unset CUDA_VISIBLE_DEVICES   # or: --nproc {build.usable}")
    if build.unsupported:
        why = message("torch_has_no_code_for_gpus", torch=build.torch, gpus=build.unsupported)
        return fail(why, f"# another build: {INSTALL}")
    if not build.nccl:
        return unknown(message("torch_has_no_nccl", machine=gpus))
    return ok(message("torch_build_on_gpus", torch=build.torch, cuda=build.cuda, nccl=build.nccl, machine=gpus))


@dataclass(frozen=True)
class Package:
    """An installed package that an engine needs.

    needed: the versions that samestep's extra asks for, as in '>=1.0'. fits: whether `version` is one. error: why it
    does not import; '' where it does.
    """

    name: str
    version: str
    needed: str
    fits: bool
    error: str


@dataclass(frozen=True)
class EnginePackages:
    """The packages of the engines that are installed on one machine."""

    packages: tuple[Package, ...]


def try_engine_packages(info: LaunchInfo) -> EnginePackages:
    return EnginePackages(tuple(_try_package(name) for name in needs(PACKAGE / "engines") if version_of(name)))


def needs(engines: Path) -> list[str]:
    """Returns the packages that the engines in a folder need, sorted, without importing them: that imports torch."""
    packages: set[str] = set()
    for file in engines.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Needs":
                for keyword in (keyword for keyword in node.keywords if keyword.arg == "packages"):
                    packages |= set(ast.literal_eval(keyword.value))
    return sorted(packages)


def _try_package(name: str) -> Package:
    needed, fits = _needed_versions(name), True
    if needed:
        from packaging.specifiers import SpecifierSet

        fits = SpecifierSet(needed).contains(version_of(name), prereleases=True)
    error = ""
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as raised:
        error = _first_line(raised)
    return Package(name, version_of(name), needed, fits=fits, error=error)


def _needed_versions(name: str) -> str:
    """Returns the versions of a package that samestep's extras ask for."""
    try:
        entries = requires("samestep") or []
    except PackageNotFoundError:
        return ""
    for entry in entries:
        if (match := re.match(rf"{name}\s*\(?([<>=!~][^;)]*)", entry)) and "extra ==" in entry:
            return match[1].strip()
    return ""


def judge_engine_packages(installed: EnginePackages) -> list[Finding]:
    findings = []
    for package in installed.packages:
        name, fix = package.name, f"pip install --upgrade {quoted(f'{package.name}{package.needed}')}"
        if package.error:
            why = message("engine_package_does_not_import", package=name, version=package.version, error=package.error)
            findings += fail(why, fix)
        elif not package.fits:
            why = message("engine_package_is_too_old", package=name, version=package.version, needed=package.needed)
            findings += warn(why, fix)
    if findings:
        return findings
    names = [f"{package.name} {package.version}" for package in installed.packages]
    return ok(message("engine_packages_import", packages=names) if names else message("no_engine_package"))


@dataclass(frozen=True)
class Encodings:
    """The text encodings of one machine.

    text: of open() without one. file_names: of files. variables: LC_ALL, LC_CTYPE and LANG, those that are set.
    """

    text: str
    file_names: str
    variables: tuple[str, ...]


def read_encodings(info: LaunchInfo) -> Encodings:
    variables = [f"{name}={os.environ[name]}" for name in ("LC_ALL", "LC_CTYPE", "LANG") if name in os.environ]
    return Encodings(locale.getpreferredencoding(False), sys.getfilesystemencoding(), tuple(variables))


def judge_encodings(encodings: Encodings) -> list[Finding]:
    text, names, variables = encodings.text, encodings.file_names, encodings.variables
    if "utf" not in text.lower() or "utf" not in names.lower():
        why = message("encoding_is_not_utf8", text=text, file_names=names, variables=variables)
        return warn(why, "export LC_ALL=C.UTF-8")
    return ok(message("encoding_is_utf8", text=text))


PROBES = (
    MachineProbe(name="versions", group="environment", facts=Versions, gather=read_versions, judge=judge_versions),
    MachineProbe(
        name="installation",
        group="environment",
        facts=PythonEnvironment,
        gather=read_python_environment,
        judge=judge_python_environments,
    ),
    MachineProbe(
        name="torch_build",
        group="environment",
        facts=TorchBuild,
        gather=read_torch_build,
        judge=for_each(judge_torch_build),
        in_worker=True,
    ),
    MachineProbe(
        name="engine_packages",
        group="environment",
        facts=EnginePackages,
        gather=try_engine_packages,
        judge=for_each(judge_engine_packages),
        in_worker=True,
    ),
    MachineProbe(
        name="locale", group="environment", facts=Encodings, gather=read_encodings, judge=for_each(judge_encodings)
    ),
)
