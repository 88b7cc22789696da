"""Tests for each promise of the plugin: run by test_promises.py, which looks at what pytest then prints."""

import os
import re
import signal
import subprocess
import time
import unittest

import pytest
import torch
import torch.distributed as dist

from samestep.testing import ranks

SECONDS = round(float(os.environ["SAMESTEP_TESTS_IMPORT_S"]))  # in which both ranks reach their line


@ranks(2)
def test_sum():
    total = torch.tensor([1 + dist.get_rank()])
    dist.all_reduce(total)
    assert total.item() == 3


@ranks(3, backend=None)
def test_without_a_group():
    assert not dist.is_initialized()
    assert os.environ["WORLD_SIZE"] == "3"


@pytest.fixture
def factor(request):
    return 10 * request.param


@pytest.fixture(scope="module")
def of_module():
    print("opened by", os.environ["RANK"])
    yield dist.get_rank()
    print("closed by", os.environ["RANK"])


@ranks(2)
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("factor", [3], indirect=True)
def test_fixtures(number, factor, tmp_path, shared_tmp_path, monkeypatch, capsys, of_module):
    monkeypatch.setenv("PLANTED", str(dist.get_rank()))
    (tmp_path / "own").write_text(os.environ["PLANTED"])
    (shared_tmp_path / f"rank{dist.get_rank()}").touch()
    dist.barrier()
    assert sorted(path.name for path in shared_tmp_path.iterdir()) == ["rank0", "rank1"]
    assert (tmp_path / "own").read_text() == str(of_module)
    assert (number, factor) in [(1, 30), (2, 30)]
    print("heard")
    assert capsys.readouterr().out == "heard\n"


@ranks(2)
def test_the_environment_is_as_before():
    assert "PLANTED" not in os.environ


class TestClass:
    pytestmark = ranks(2)

    def test_method(self):
        assert dist.get_world_size() == 2


@ranks(2)
def test_assert():
    print("printed by", dist.get_rank())
    found = {"rank": dist.get_rank()}
    assert found == {"rank": 0}


@ranks(2)
def test_both_fail():
    assert dist.get_world_size() == 5


@ranks(2)
def test_leaves_the_group_broken():
    if dist.get_rank() == 1:
        raise ValueError("planted")
    dist.barrier()


@ranks(2)
def test_after_a_broken_group():
    dist.barrier()


@ranks(2, timeout=SECONDS)
def test_sleeps():
    print("started", subprocess.Popen(["sleep", "1000"]).pid)
    if dist.get_rank() == 0:
        time.sleep(1000)
    dist.all_reduce(torch.ones(3))


@ranks(2, timeout=SECONDS)
def test_holds_the_gil():
    if dist.get_rank() == 1:
        re.match("(a+)+$", "a" * 60 + "b")


@ranks(2)
@pytest.mark.timeout(SECONDS)
def test_alarm_of_pytest_timeout():
    time.sleep(1000)


@ranks(2)
def test_killed():
    dist.barrier()  # else the other rank may still connect
    print("last words")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@ranks(2)
def test_exits():
    dist.barrier()
    if dist.get_rank() == 0:
        os._exit(3)


@ranks(2)
def test_after_a_death():
    dist.barrier()


@ranks(2)
def test_skips_differ():
    if dist.get_rank() == 1:
        pytest.skip("not on this rank")


@ranks(2)
def test_all_skip():
    pytest.skip("on no rank")


@ranks(1, backend="planted")
def test_unknown_backend():
    pass


@pytest.mark.skipif(True, reason="not here")
@ranks(2, backend="nccl")
def test_skipped_by_a_mark():
    pass


@ranks(2)
@pytest.mark.xfail(reason="known")
def test_xfails():
    assert dist.get_rank() > 1


@pytest.fixture
def fails_on_rank_1():
    assert os.environ["RANK"] == "0"


@ranks(2)
def test_setup_fails(fails_on_rank_1):
    dist.barrier()


@pytest.fixture
def torn():
    yield
    assert os.environ["RANK"] == "0"


@ranks(2)
def test_teardown_fails(torn):
    pass


@ranks(threads=8)
def test_threads(tmp_path):
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    assert total.item() == 28


@ranks(threads=4)
def test_a_thread_fails():
    print("printed by", dist.get_rank())
    assert dist.get_rank() != 2
    dist.barrier()


@ranks(threads=4, timeout=SECONDS)
def test_a_thread_sleeps():
    if dist.get_rank() == 3:
        time.sleep(1000)
    dist.barrier()


@ranks(threads=4)
def test_threads_after_a_failure():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.ones(1, 2) * dist.get_rank()).sum().backward()
    gradients = [torch.empty(1, 2) for _ in range(4)]
    dist.all_gather(gradients, model.module.weight.grad)
    assert [gradient.tolist() for gradient in gradients] == [[[1.5, 1.5]]] * 4


@ranks(2)
def test_subtests_fail(subtests):
    for number in range(3):
        with subtests.test(number=number):
            assert number < 1 + dist.get_rank()


@ranks(2)
class TestUnittest(unittest.TestCase):
    def test_subtests(self):
        for number in range(2):
            with self.subTest(number=number):
                assert number == 0


@ranks(2)
def test_calls_pytest_exit():
    if dist.get_rank() == 1:
        pytest.exit("enough")


@ranks(2)
def test_raises_an_interrupt():
    if dist.get_rank() == 1:
        raise KeyboardInterrupt


@ranks(2)
def test_forks():
    if copy := os.fork():
        os.waitpid(copy, 0)


@ranks(2)
def test_after_a_fork():
    dist.barrier()
