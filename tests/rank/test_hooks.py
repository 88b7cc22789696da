"""What is attached to torch is detached without a trace, also where another library has replaced the place since."""

from __future__ import annotations

import functools
import gc
import inspect
import pickle
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn

from samestep.rank.hooks import Hooks, calling_frame
from samestep.recorder.guards import Guard


class Base:
    def add(self, number: int) -> int:
        return number + 1

    @staticmethod
    def double(number: int) -> int:
        return 2 * number


class Kind(Base):
    pass


def counting(calls: list[Any]) -> Callable[..., Any]:
    def replacement(original: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    return replacement


@pytest.fixture(params=[True, False], ids=["guarded", "unguarded"])
def attached(request: pytest.FixtureRequest) -> Hooks:
    return Hooks(Guard() if request.param else None)


def test_each_kind_of_place_holds_again_what_it_held(attached: Hooks) -> None:
    one, calls = Kind(), list[Any]()
    places = [
        (dist, "all_reduce"),
        (Base, "add"),
        (Base, "double"),
        (Kind, "double"),
        (one, "add"),
        (Tensor, "normal_"),
    ]
    before = [dict(vars(owner)) for owner, _ in places]
    for owner, name in [*places, *places]:
        attached.attach(owner, name, counting(calls))
    attached.attach(dist, "no_such_collective", counting(calls))
    assert one.add(1) == 2 and Kind.double(3) == 6 and one.double(3) == 6 and len(calls) == 9
    attached.detach()
    assert [dict(vars(owner)) for owner, _ in places] == before
    assert one.add(1) == 2 and len(calls) == 9


def test_a_place_with_two_names_holds_one_object_at_both(attached: Hooks) -> None:
    """A P2POp takes the very function that torch's own module holds."""
    send = dist.isend
    attached.attach(dist, "isend", counting([]), c10d)
    assert dist.isend is c10d.isend is not send
    assert inspect.signature(dist.isend) == inspect.signature(send) and dist.isend.__name__ == "isend"
    attached.detach()
    assert dist.isend is c10d.isend is send


def test_what_another_library_has_put_there_since_stays_and_ours_is_inert(attached: Hooks) -> None:
    ours, theirs = list[int](), list[int]()
    owner = SimpleNamespace(add=lambda number: number + 1)
    attached.attach(owner, "add", lambda add, number: ours.append(number) or add(number))
    mine = owner.add

    def their_add(number: int) -> Any:
        theirs.append(number)
        return mine(number)

    owner.add = their_add
    attached.attach(owner, "add", lambda add, number: ours.append(number) or add(number))
    assert owner.add(1) == 2 and (ours, theirs) == ([1, 1], [1])
    attached.detach()
    assert owner.add is their_add
    assert owner.add(2) == 3 and (ours, theirs) == ([1, 1], [1, 2])
    attached.attach(owner, "add", lambda add, number: 0)
    assert owner.add is their_add


def test_a_module_that_is_never_imported_leaves_no_finder(attached: Hooks) -> None:
    finders, called = [*sys.meta_path], list[str]()
    attached.after_import("samestep.no_such_module", lambda: called.append("late"))
    attached.after_import("torch", lambda: called.append("at once"))
    with pytest.raises(ModuleNotFoundError):
        __import__("samestep.no_such_module")
    attached.after_import("samestep.no_such_module_either", lambda: called.append("late"))
    attached.detach()
    assert sys.meta_path == finders and called == ["at once"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_module_is_hooked_when_it_is_imported(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard()
    attached, called = Hooks(guard), list[str]()

    def then() -> None:
        called.append("then")
        if fails:
            raise KeyError("planted")

    monkeypatch.delitem(sys.modules, "this", raising=False)
    attached.after_import("this", then)
    assert __import__("this").d and called == ["then"] and (guard.fault is not None) == fails


def test_a_compiled_model_is_the_same_with_and_without(attached: Hooks) -> None:
    model, rows, calls = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.randn(2, 3), list[Any]()

    def replacement(call: Any, self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            calls.append(self)
        return call(self, *args, **kwargs)

    attached.attach(nn.Module, "__call__", replacement)
    compiled = torch.compile(lambda x: torch.relu(model(x)), backend="eager", fullgraph=True)
    expected = torch.relu(model(rows))
    assert torch.equal(compiled(rows), expected) and calls
    attached.detach()
    assert torch.equal(compiled(rows), expected)


def test_the_caller_is_told_behind_every_hook(attached: Hooks) -> None:
    owner, callers = SimpleNamespace(ask=lambda: None), list[str]()

    def ask(original: Any) -> None:
        callers.append(calling_frame().f_code.co_name)
        original()

    attached.attach(owner, "ask", ask)

    def user() -> None:
        owner.ask()

    user()
    assert callers == ["user"]


def test_a_generator_can_be_read_where_a_replacement_fails_after_it_has_read_it() -> None:
    def failing(original: Any, parameters: Any, *args: Any) -> Any:
        list(parameters)
        raise KeyError("planted")

    guard, owner = Guard(), SimpleNamespace(clip_grad_norm_=lambda parameters: sum(parameters))
    Hooks(guard).attach(owner, "clip_grad_norm_", failing)
    assert owner.clip_grad_norm_(number for number in (1, 2)) == 3 and isinstance(guard.fault, KeyError)


@pytest.mark.parametrize("by_name", [False, True])
def test_an_iterator_of_another_kind_can_be_read_again_too(by_name: bool) -> None:
    def failing(original: Any, parameters: Any) -> Any:
        list(parameters)
        raise KeyError("planted")

    owner, odd = SimpleNamespace(clip_grad_norm_=lambda parameters: sum(parameters)), filter(None, (0, 1, 2))
    Hooks(Guard()).attach(owner, "clip_grad_norm_", failing)
    assert (owner.clip_grad_norm_(parameters=odd) if by_name else owner.clip_grad_norm_(odd)) == 3


def test_an_exception_of_the_original_keeps_no_frame_of_a_hook() -> None:
    """A script that catches a lack of memory, and tries a smaller batch, needs that memory."""

    class Activation:
        pass

    def forward() -> None:
        activation = Activation()
        kept.append(weakref.ref(activation))
        raise MemoryError

    kept, owner = list[Any](), SimpleNamespace(forward=forward)
    Hooks(Guard()).attach(owner, "forward", counting([]))
    gc.disable()
    try:
        with suppress(MemoryError):
            owner.forward()
        assert kept[0]() is None
    finally:
        gc.enable()


def scaled(x: Tensor) -> Tensor:
    return x * torch.rand(3)


def test_pickle_and_torch_script_take_a_hook_for_the_function(attached: Hooks) -> None:
    """A script's transform may hold torch.rand, and be sent to a worker that is spawned."""
    rand, known = torch.rand, dict(torch.jit._builtins._get_builtin_table())
    attached.attach(torch, "rand", counting([]))
    assert pickle.loads(pickle.dumps(torch.rand)) is torch.rand is not rand
    assert torch.jit.script(scaled)(torch.ones(3)).shape == (3,)
    attached.detach()
    assert torch.jit._builtins._get_builtin_table() == known and torch.rand is rand


def test_what_tells_of_a_fault_may_fail_and_the_training_goes_on() -> None:
    def failing(original: Any, number: int) -> Any:
        raise KeyError("planted")

    def on_a_full_disk(fault: Exception) -> None:
        raise OSError("no space left")

    guard, owner = Guard(), Kind()
    guard.begin(on_a_full_disk)
    Hooks(guard).attach(owner, "add", failing)
    assert owner.add(1) == 2 and isinstance(guard.fault, KeyError)


def test_a_guard_makes_all_of_its_hooks_inert() -> None:
    guard, owner, calls = Guard(), Kind(), list[Any]()
    Hooks(guard).attach(owner, "add", counting(calls))
    guard.end(KeyError("planted"))
    assert owner.add(1) == 2 and not calls


def test_a_script_that_runs_in_the_place_of_the_original_may_raise() -> None:
    guard = Guard()

    def instead(original: Any, function: Callable[[], Any]) -> Any:
        return original.run(functools.partial(function))

    owner = SimpleNamespace(spawn=lambda function: None)
    Hooks(guard).attach(owner, "spawn", instead)
    with pytest.raises(ZeroDivisionError):
        owner.spawn(lambda: 1 // 0)
    assert owner.spawn(lambda: 3) == 3 and guard.fault is None
