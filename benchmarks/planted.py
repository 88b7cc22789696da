"""What the line that monitored_scripts.py inserts into a public script calls. Copied beside the script.

FAULT and AT, the step, come from the environment. The libraries that scripts have beside torch are here, too, as far as
they are used.
"""

import os
import sys  # noqa: F401 - of the planted lines
import threading
import time
import types

import torch
import torch.distributed as dist

FAULT, AT = os.environ["FAULT"], int(os.environ["AT"])
ROWS = int(os.environ["ROWS"])  # of a batch
ROW_S = 0.1 / ROWS
KEPT = []
LOCK = threading.Lock()
ZEROS = torch.zeros(4)
# Python objects, as in a dataset of strings; one rank has them.
OBJECTS = [float(n) for n in range(12_000_000 * (FAULT == "copy_on_write" and os.environ.get("RANK") == "1"))]
count = {"step": 0, "row": 0, "read": 0}
hooked = []


def rank():
    return dist.get_rank()


def told():
    """Notes when the training begins to hang."""
    with open("hung", "w") as file:
        file.write(str(time.time()))


def due():
    """Whether this is the step of the fault."""
    count["step"] += 1
    if count["step"] == AT:
        told()
    return count["step"] == AT


def now():
    """Whether this is the step of the fault, on the rank that has it."""
    count["step"] += 1
    if count["step"] == AT and rank() == 1:
        told()
        return True
    return False


def now_row():
    """Whether this is a row of the step of the fault, on the rank that has it."""
    workers = torch.utils.data.get_worker_info()
    count["row"] += 1
    if count["row"] == ROWS * AT // (workers.num_workers if workers else 1) and rank() == 1:
        told()
        return True
    return False


def spin():
    if rank() == 1:
        until = time.thread_time() + 0.1
        while time.thread_time() < until:
            pass


def delayed(_, bucket):
    if rank() == 1:
        time.sleep(0.1)
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def hook(model):
    if not hooked:
        hooked.append(model)
        model.register_comm_hook(None, delayed)


def keep():
    """Keeps a MiB of each batch, in the loader workers of one rank; a row takes a while."""
    time.sleep(ROW_S)
    if rank() == 1:
        KEPT.append(b"x" * ((1 << 20) // ROWS))


def read():
    """Reads Python objects, which counts their references."""
    time.sleep(ROW_S)
    if rank() == 1:
        piece = len(OBJECTS) // (300 * ROWS)
        first = count["read"] * piece % max(1, len(OBJECTS))
        count["read"] += 1
        for _ in OBJECTS[first : first + piece]:
            pass


def config_of(path):
    import yaml

    return yaml.safe_load(open(path))


def hydra_main(config_path, config_name, **_):
    return lambda function: lambda: function(config_of(f"{config_path}/{config_name}.yaml"))


hydra_of_planted = types.SimpleNamespace(main=hydra_main)
omegaconf_of_planted = types.SimpleNamespace(DictConfig=dict)
boto3_of_planted = types.SimpleNamespace()
