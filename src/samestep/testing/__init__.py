"""A pytest plugin: `@ranks(2)` runs a test in two processes with a torch.distributed process group, and `same_training`
says of a script that its training is as it was.

    from samestep.testing import ranks

    @ranks(2)
    def test_sum():
        ...

See docs/testing.md. pytest loads this module at its start; everything else is imported by the first such test.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from samestep.testing.run_on_ranks import Pool
    from samestep.testing.same_training import SameTraining

__all__ = ["ranks"]
MARK = "samestep_ranks"  # not 'ranks', which may be a mark of the project's own: pytest loads this plugin everywhere
TIMEOUT_S = 60.0
RANK_PLUGIN = "samestep-rank"  # registered in the processes that are ranks
POOL: pytest.StashKey[Pool] = pytest.StashKey()


def ranks(
    processes: int | None = None,
    *,
    threads: int | None = None,
    backend: str | None = "gloo",
    timeout: float = TIMEOUT_S,
) -> pytest.MarkDecorator:
    """Runs a test function, or every test of a class, on several ranks of a torch.distributed process group.

    processes: the number of ranks, each a process. threads: the number of ranks, each a thread of one process; give one
    of the two. backend: of torch.distributed, such as 'gloo' or 'nccl'; None opens no group. timeout: seconds, for the
    test and its fixtures; then the ranks are ended and the report shows what each was doing. A wrong value fails the
    collection of the test's file.
    """
    given = [size for size in (processes, threads) if size is not None]
    name = "threads=" if threads is not None else ""
    problem = ""
    if len(given) != 1:
        problem = "@ranks takes the number of ranks, as in @ranks(2), or of threads, as in @ranks(threads=8)"
    elif not isinstance(given[0], int) or isinstance(given[0], bool) or given[0] < 1:
        problem = f"@ranks({name}{given[0]!r}): give a whole number of at least 1"
    elif not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf"):
        problem = f"@ranks(timeout={timeout!r}): give a number of seconds above 0"
    elif threads is not None and backend not in ("gloo", "threaded"):
        problem = (
            f"@ranks(threads={threads}, backend={backend!r}): threads have a group of their own; leave backend out"
        )
    if problem:
        pytest.fail(problem, pytrace=False)
    mark: pytest.MarkDecorator = getattr(pytest.mark, MARK)
    return mark(given[0], threads=threads is not None, backend=backend, timeout=float(timeout))


def pytest_addoption(parser: pytest.Parser) -> None:
    what = "write the records of same_training(…, record=FOLDER) anew"
    parser.getgroup("samestep").addoption("--samestep-update", action="store_true", help=what)


def pytest_configure(config: pytest.Config) -> None:
    what = "runs a test on several ranks of a torch.distributed process group; write @samestep.testing.ranks(2)"
    config.addinivalue_line("markers", f"{MARK}: {what}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    mark = item.get_closest_marker(MARK)
    if mark is None or item.config.pluginmanager.hasplugin(RANK_PLUGIN):
        return None
    from samestep.testing import run_on_ranks

    if POOL not in item.config.stash:
        item.config.stash[POOL] = run_on_ranks.Pool(item.config)
    run_on_ranks.run_protocol(item.config.stash[POOL], item, nextitem, mark)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if POOL in session.config.stash:
        session.config.stash[POOL].close()


@pytest.fixture
def shared_tmp_path(request: pytest.FixtureRequest) -> Path:
    """A new folder that all ranks of the test share. `tmp_path` is another folder on each rank."""
    rank = request.config.pluginmanager.get_plugin(RANK_PLUGIN)
    if rank is None:
        pytest.fail("shared_tmp_path is for tests with @ranks; use tmp_path here", pytrace=False)
    return Path(rank.test.shared_folder)


@pytest.fixture
def same_training(request: pytest.FixtureRequest, tmp_path: Path) -> SameTraining:
    """Fails where a script's training is not that of a git revision, or of a stored record; see docs/testing.md."""
    from samestep.testing.same_training import SameTraining

    return SameTraining(request.config.rootpath, tmp_path, request.config.getoption("--samestep-update"))
