"""`samestep check --against` and `--with`: a change of the training, a change that is none, a mistake."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest

from against.changes import CHANGES, Change
from against.plant import SCRIPT, committed, first_change, git, make_change, named_by, results_of
from command import samestep
from lane_marks import CHECK, FULL
from planting import Edit, plant_in_files
from said import tells

QUICK = ("check", "--nproc", "2", "--launcher", "fork", "--steps", "5")
NAMED = ("decay of the average", "augmentation")
HEALTHY = ("parameters with each other's names", "accumulates at once")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("changed", CHANGES, ids=lambda each: each.name)
def test_each_change_applies(changed: Change, tmp_path: Path) -> None:
    """In a moment, where comparing them takes minutes."""
    make_change(changed, Path(shutil.copytree(SCRIPT, tmp_path / "project")))


@pytest.mark.check
@pytest.mark.parametrize("changed", [each for each in CHANGES if each.name in NAMED], ids=lambda each: each.name)
def test_a_change_of_the_training_is_named_with_the_lines_of_both_sides(changed: Change, tmp_path: Path) -> None:
    folder = committed(tmp_path / "project")
    make_change(changed, folder)
    before = contents(folder)
    done = samestep(*QUICK, "--json", "--against", "main", "--out", "../out", "train.py", cwd=folder)
    assert done.returncode == 1, done.stdout + done.stderr
    results = results_of(done.stdout)
    first, place = results.first_divergence, first_change(results)
    assert first and place and named_by(results) in changed.questions and first.step == changed.step
    assert changed.line in place.text
    found = next(finding for finding in results.findings if finding.divergence == first)
    assert found.sites and all(site.file.startswith("main:") for site in found.expected_sites)
    assert found.expected_sites and all(Path(site.file).is_relative_to(folder) for site in found.sites)
    assert contents(folder) == before, "the user's files, or git's, were written to"


@pytest.mark.check
@pytest.mark.parametrize("changed", [each for each in CHANGES if each.name in HEALTHY], ids=lambda each: each.name)
def test_a_change_that_is_none_of_the_training_is_the_same(changed: Change, tmp_path: Path) -> None:
    folder = committed(tmp_path / "project")
    make_change(changed, folder)
    words = [*QUICK, "--against", "HEAD", "--out", "../out", "train.py", *changed.arguments.split()]
    done = samestep(*words, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.check
def test_a_script_that_was_moved_in_a_folder_of_the_repository(tmp_path: Path) -> None:
    folder = committed(tmp_path / "project")
    (folder / "jobs").mkdir()
    for name in ("train.py", "model.py", "data.py"):
        git(folder, "mv", name, f"jobs/{name}")
    shutil.copy(folder / "images.pt", folder / "jobs")
    plant_in_files(folder, [Edit("(0.9, 0.95)", "(0.9, 0.99)")], "jobs/train.py")
    words = [*QUICK, "--json", "--out", "../../out", "--against", "main:train.py", "train.py"]
    done = samestep(*words, cwd=folder / "jobs")
    assert done.returncode == 1 and named_by(results_of(done.stdout)) == "settings", done.stdout + done.stderr
    assert samestep(*QUICK, "--against", "main", "train.py", cwd=folder / "jobs").returncode == 2


def wheel(folder: Path, version: str, rate: float) -> None:
    """Builds a package of one module, `rates`."""
    folder.mkdir(exist_ok=True)
    about = f"rates-{version}.dist-info"
    with zipfile.ZipFile(folder / f"rates-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr("rates.py", f"RATE = {rate}\n")
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: rates\nVersion: {version}\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", f"rates.py,,\n{about}/METADATA,,\n{about}/WHEEL,,\n{about}/RECORD,,\n")


@pytest.mark.parametrize(("rate", "code"), [pytest.param(0.002, 0, marks=FULL), pytest.param(0.004, 1, marks=CHECK)])
def test_another_version_of_a_package(rate: float, code: int, tmp_path: Path) -> None:
    folder = committed(tmp_path / "project")
    wheel(tmp_path / "wheels", "2.0", rate)
    edits = [Edit("lr=args.lr", "lr=RATE"), Edit("import copy\n", "import copy\n" + IMPORT)]
    plant_in_files(folder, edits, "train.py")
    env = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels")}
    words = [*QUICK, "--json", "--with", "rates==2.0", "--out", "../out", "train.py"]
    done = samestep(*words, cwd=folder, env=env)
    assert done.returncode == code, done.stdout + done.stderr
    results = results_of(done.stdout)
    assert results.first == "train.py with rates==2.0"
    assert results.notes[0].id == "package_of_one_side"
    if code:
        assert named_by(results) == "rate"


IMPORT = "try:\n    from rates import RATE\nexcept ImportError:\n    RATE = 0.002\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--against", "nowhere"], "no_such_revision"),
        (["--against", "--exec"], "no_name_of_a_revision"),
        (["--against", "main:other.py"], "revision_without_script"),
        (["--with", "rates>=2"], "no_package_with_version"),
        (["--with", "--index-url=http://elsewhere"], "no_package_with_version"),
        (["--against", "main", "--fix"], "fix_does_not_go_with_against"),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], said: str, tmp_path: Path) -> None:
    folder = committed(tmp_path / "project")
    (folder / "new.py").write_text("")
    done = samestep("check", *words, "train.py", cwd=folder)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert said in BEGINS and BEGINS[said] in done.stderr
    assert {path.name for path in folder.iterdir()} & {"runs"} == set()


BEGINS = {
    "no_such_revision": "no such commit",
    "no_name_of_a_revision": "no name of a revision",
    "revision_without_script": "has no other.py",
    "no_package_with_version": "give PACKAGE==VERSION",
    "fix_does_not_go_with_against": "--fix does not go with",
}


@pytest.mark.check
def test_packages_that_cannot_be_had_are_one_sentence(tmp_path: Path) -> None:
    folder = committed(tmp_path / "project")
    env = {"PIP_NO_INDEX": "1"}
    done = samestep("check", "--with", "rates==9.0", "--out", "../out", "train.py", cwd=folder, env=env)
    assert done.returncode == 2 and tells(done.stderr, "packages_not_installed", packages="rates==9.0"), done.stderr
