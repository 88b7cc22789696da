"""The wrong files of bad_inputs.py, of jobs, scripts, weights and results, and wrong types in Python."""

from __future__ import annotations

from collections.abc import Iterator

from bad_input_table import FAILED, QUICK, REFUSED, WORKS, Case


def wrong_files() -> Iterator[Case]:
    yield from _job_files()
    yield from _python()


def _changed(line: str) -> str:
    """Returns the quick job with another line in its Job."""
    name = line.partition("=")[0].strip()
    lines = [line if old.strip().startswith(f"{name}=") else old for old in QUICK.splitlines()]
    if lines == QUICK.splitlines():
        lines.insert(-1, line)
    return "\n".join(lines) + "\n"


JOB_FILES: dict[str, str | bytes] = {
    "empty": "",
    "syntax error": "def job(:\n",
    "indentation": "def job():\nreturn 1\n",
    "tabs and spaces": "def job():\n\tx = 1\n        return x\n",
    "no job function": "x = 1\n",
    "job is no function": "job = 3\n",
    "job is a class": "class job:\n    pass\n",
    "job is async": "async def job():\n    return 1\n",
    "job is a generator": "def job():\n    yield 1\n",
    "job returns None": "def job():\n    pass\n",
    "job returns a text": "def job():\n    return 'job'\n",
    "job returns its class": "import samestep\ndef job():\n    return samestep.Job\n",
    "job needs an argument": "def job(data):\n    return data\n",
    "job takes positional ones": "def job(*args):\n    return args\n",
    "raises at import": "raise ValueError('mine')\n",
    "raises with two lines": "raise ValueError('one\\ntwo\\nthree')\n",
    "raises a long text": "raise ValueError('x' * 100000)\n",
    "raises escapes": "raise ValueError('\\x1b[31mred\\x07')\n",
    "raises KeyboardInterrupt": "raise KeyboardInterrupt\n",
    "raises SystemExit": "raise SystemExit\n",
    "raises StopIteration": "raise StopIteration\n",
    "raises a BaseException": "class Mine(BaseException):\n    pass\nraise Mine('no')\n",
    "raises MemoryError": "raise MemoryError\n",
    "raises an odd error": "class Odd(Exception):\n    def __str__(self):\n        raise ValueError\nraise Odd\n",
    "exits 0 at import": "import sys\nsys.exit(0)\n",
    "exits 3 at import": "import sys\nsys.exit(3)\n",
    "os._exit at import": "import os\nos._exit(0)\n",
    "aborts at import": "import os\nos.abort()\n",
    "kills itself": "import os\nos.kill(os.getpid(), 9)\n",
    "segfault": "import ctypes\nctypes.string_at(0)\n",
    "exits in job": "import sys\ndef job():\n    sys.exit(0)\n",
    "infinite recursion": "def job():\n    return job()\n",
    "recursion at import": "def f():\n    return f()\nf()\n",
    "deep expression": "x = " + "(" * 500 + ")" * 500 + "\n",
    "imports itself": "import job_file\ndef job():\n    return job_file.nope\n",
    "prints much": "print('x' * 10_000_000)\nraise ValueError('after')\n",
    "prints binary": "import sys\nsys.stdout.buffer.write(bytes(range(256)) * 100)\nraise ValueError('after')\n",
    "closes its outputs": "import os\nos.close(1)\nos.close(2)\nraise ValueError('after')\n",
    "closes everything": "import os\nos.closerange(0, 4096)\nraise ValueError('after')\n",
    "changes the folder": "import os\nos.chdir('/')\nraise ValueError('after')\n",
    "removes its folder": "import shutil, os\nshutil.rmtree(os.environ['TMPDIR'])\nraise ValueError('after')\n",
    "no such module": "import no_such_module\n",
    "relative import": "from . import x\n",
    "binary": bytes(range(256)),
    "null bytes": b"x = 1\0\n",
    "not utf-8": "def job():\n    return 'é'\n".encode("latin-1"),
    "utf-16": "def job():\n    return 1\n".encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbfraise ValueError('after')\n",
    "carriage returns": b"raise ValueError('after')\r\n",
    "old carriage returns": b"x = 1\rraise ValueError('after')\r",
    "wrong coding line": b"# coding: nope\nraise ValueError\n",
    "a notebook": '{"cells": [], "nbformat": 4}',
    "a shell script": "#!/bin/sh\necho hello\n",
    "a png": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "asserts": "assert False\n",
    "warns as an error": "import warnings\nwarnings.simplefilter('error')\nwarnings.warn('mine')\n",
    "a thread that raises": "import threading\nthreading.Thread(target=lambda: 1 / 0).start()\nraise ValueError\n",
    "a child that stays": "import subprocess\nsubprocess.Popen(['sleep', '1'])\nraise ValueError('after')\n",
    "replaces stderr": "import sys\nsys.stderr = None\nsys.stdout = None\nraise ValueError('after')\n",
    "replaces print": "import builtins\nbuiltins.print = None\nbuiltins.open = None\nraise ValueError('after')\n",
    "train is None": _changed("        train=None,"),
    "train is a list": _changed("        train=[],"),
    "train is a text": _changed("        train='rows',"),
    "train is a number": _changed("        train=3,"),
    "train is empty": _changed("        train=TensorDataset(torch.zeros(0, 4), torch.zeros(0)),"),
    "model is a module": _changed("        model=torch.nn.Linear(4, 3),"),
    "model is None": _changed("        model=None,"),
    "model returns None": _changed("        model=lambda: None,"),
    "model takes an argument": _changed("        model=lambda x: x,"),
    "model of another width": _changed("        model=lambda: (torch.manual_seed(0), torch.nn.Linear(5, 3))[1],"),
    "criterion is None": _changed("        criterion=None,"),
    "criterion returns None": _changed("        criterion=lambda output, batch: None,"),
    "criterion returns a float": _changed("        criterion=lambda output, batch: 1.0,"),
    "criterion without gradient": _changed("        criterion=lambda output, batch: torch.zeros(()),"),
    "criterion of one argument": _changed("        criterion=lambda output: output.sum(),"),
    "criterion exits": _changed("        criterion=lambda output, batch: __import__('sys').exit(0),"),
    "optimizer is None": _changed("        optimizer=None,"),
    "optimizer is a class": _changed("        optimizer=torch.optim.SGD,"),
    "optimizer of a wrong setting": _changed("        optimizer=Recipe(torch.optim.SGD, {'nope': 1}),"),
    "optimizer of a text": _changed("        optimizer=Recipe('SGD', {}),"),
    "global_batch 0": _changed("        global_batch=0,"),
    "global_batch text": _changed("        global_batch='8',"),
    "global_batch float": _changed("        global_batch=8.0,"),
    "epochs 0": _changed("        epochs=0,"),
    "epochs -1": _changed("        epochs=-1,"),
    "epochs text": _changed("        epochs='2',"),
    "epochs nan": _changed("        epochs=float('nan'),"),
    "metrics a list": _changed("        metrics=[1],"),
    "metrics of text": _changed("        metrics={'accuracy': 'nope'},"),
    "an unknown field": _changed("        nope=1,"),
}


ODD_FILES = {
    "a folder": "mkdir job.py; SAMESTEP run job.py",
    "a dangling link": "ln -s nowhere job.py; SAMESTEP run job.py",
    "a link to itself": "ln -s job.py job.py; SAMESTEP run job.py",
    "a pipe": "mkfifo job.py; SAMESTEP run job.py",
    "a device": "SAMESTEP run /dev/zero",
    "a socket": "PYTHON -c \"import socket; socket.socket(socket.AF_UNIX).bind('job.py')\"; SAMESTEP run job.py",
    "a package folder": "mkdir p; touch p/__init__.py; SAMESTEP run p",
    "a file without .py": "cp quick.py quick; SAMESTEP run quick",
    "a dotted name of none": "SAMESTEP run no.such.module:job",
    "a dotted name of the library": "SAMESTEP run os.path:join",
    "a wheel": "cp quick.py x.whl; SAMESTEP run x.whl",
    "an out that is a file": "touch out; SAMESTEP run quick.py --out out",
    "an out that is a pipe": "mkfifo out; SAMESTEP run quick.py --out out",
    "an out that dangles": "ln -s nowhere/else out; SAMESTEP run quick.py --out out",
    "an out that links to itself": "ln -s out out; SAMESTEP run quick.py --out out",
    "an out with other files": "mkdir out; touch out/thesis.txt; SAMESTEP run quick.py --out out",
    "an out of spoilt records": "mkdir out; echo '{' > out/study.json; SAMESTEP run quick.py --out out",
    "an out of an odd record": "mkdir out; echo '[1]' > out/study.json; SAMESTEP run quick.py --out out",
    "an out of binary records": "mkdir out; head -c 9 /dev/zero > out/study.json; SAMESTEP run quick.py --out out",
    "records that are a folder": "mkdir -p out/study.json; SAMESTEP run quick.py --out out",
    "runs that are spoilt": "mkdir -p out/study.json; SAMESTEP runs out",
    "weights of text": "echo hello > w.safetensors; SAMESTEP evaluate --weights w.safetensors quick.py",
    "weights that are empty": ": > w.safetensors; SAMESTEP evaluate --weights w.safetensors quick.py",
    "weights of a huge header": "printf '\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\x7f{}' > w.safetensors; "
    "SAMESTEP evaluate --weights w.safetensors quick.py",
    "init that is empty": ": > w.safetensors; SAMESTEP run quick.py --init w.safetensors",
    "init that is a pipe": "mkfifo w.safetensors; SAMESTEP run quick.py --init w.safetensors",
    "a checked script that is empty": ": > script.py; SAMESTEP check script.py",
    "a checked script with a mistake": "echo 'def f(:' > script.py; SAMESTEP check script.py",
    "a checked folder": "mkdir script.py; SAMESTEP check script.py",
    "a checked binary": "head -c 999 /dev/zero > script.py; SAMESTEP check script.py",
}


def _job_files() -> Iterator[Case]:
    after = {"metrics of text": (FAILED, REFUSED)}
    died = ("os._exit at import", "aborts at import", "kills itself", "segfault", "closes everything")
    for name, content in JOB_FILES.items():
        codes = (FAILED, REFUSED) if name in died else after.get(name, (REFUSED,))
        line = "SAMESTEP verify job_file.py --engine ddp --nproc 2"
        yield Case(
            "input", f"job file: {name}", line, codes, files={"job_file.py": content}, changes=codes != (REFUSED,)
        )
    works = ("a file without .py", "an out that dangles", "runs that are spoilt")
    for name, line in ODD_FILES.items():
        codes = (FAILED, REFUSED, WORKS) if "checked" in name or name in works else (REFUSED,)
        yield Case("input", f"file: {name}", line, codes, changes=True)


CALLS = """
verify(3)
verify(None)
verify('')
verify('nope')
verify('quick.py', nproc='2')
verify('quick.py', nproc=2.0)
verify('quick.py', nproc=True)
verify('quick.py', nproc=0)
verify('quick.py', nproc=-1)
verify('quick.py', nproc=10**30)
verify('quick.py', engines=3)
verify('quick.py', engines=['ddp', 3])
verify('quick.py', engines=b'ddp')
verify('quick.py', engines={'ddp': 1})
verify('quick.py', engines='nope')
verify('quick.py', settings=[1])
verify('quick.py', settings={1: 2})
verify('quick.py', settings={'lr': 'x'})
verify('quick.py', settings={'lr': None})
verify('quick.py', settings={'lr': float('nan')})
verify('quick.py', out=3)
verify('quick.py', out='')
verify('quick.py', out='x' * 300)
verify('quick.py', out='a' + chr(0))
verify('quick.py', out='quick.py')
verify('quick.py', device=3)
verify('quick.py', device='nope')
verify('quick.py', steps=1)
verify('quick.py', steps='8')
verify('quick.py', deadline_s='1')
verify('quick.py', deadline_s=float('nan'))
verify('quick.py', deadline_s=float('inf'))
verify('quick.py', stall_s=-1)
verify('quick.py', machines=3)
verify('quick.py', machines={'nnodes': 2})
verify('quick.py', resume=1)
verify('quick.py', launchers='nope')
verify(lambda: 3)
verify(lambda x: 3)
verify(print)
verify(object())
compare('quick.py', rounds=0)
compare('quick.py', measured_steps='x')
run('quick.py', engine=None)
run('quick.py', engine=['ddp'])
run('quick.py', engine='')
run('quick.py', init=3)
run('quick.py', init='nowhere')
run('quick.py', best=1)
run('quick.py', log=1)
run('quick.py', log='nope')
run('quick.py', checkpoint_every=5)
run('quick.py', checkpoint_every='5')
run('quick.py', resume=True)
run('quick.py', keep=0)
run('quick.py', on_nan=None)
evaluate(3)
evaluate('nowhere', 'quick.py')
evaluate('quick.py', 'quick.py')
evaluate('quick.py', 'quick.py', predictions=3)
collectives(op=3)
collectives(op='nope')
collectives(sizes=3)
collectives(sizes='x')
collectives(dtype='nope')
collectives(seconds='x')
runs(3)
runs('nowhere')
runs('')
runs('x' * 300)
MachineOptions(nnodes=0)
MachineOptions(port=70000)
MachineOptions(timeout_s=float('inf'))
MachineOptions(hosts=['a b'])
"""


def _python() -> Iterator[Case]:
    catch = (
        "import samestep, sys\n"
        "try:\n    samestep.{call}\n"
        "except samestep.UserError as error:\n"
        "    print('samestep:', error, file=sys.stderr); sys.exit(2)\n"
    )
    for call in filter(None, map(str.strip, CALLS.splitlines())):
        yield Case(
            "input",
            f"python: {call[:60]}",
            "PYTHON call.py",
            files={"quick.py": QUICK, "call.py": catch.replace("{call}", call)},
        )
