"""Starts ranks with Ray Train's TorchTrainer, on a Ray cluster of its own, and ends with them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

LONGEST = 24  # characters of the folder of temporary files, to which Ray adds up to 80 of a socket's 107


def start(size: int, rank: Callable[[], int], storage: str) -> None:
    """Runs `rank` in each of `size` workers of a TorchTrainer, and waits for them.

    rank: returns its exit code; a function that a new process can import. storage: the folder for Ray Train's files.
    Raises SystemExit where a rank fails.
    """
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    on_gpus = os.environ.get("SAMESTEP_DEVICES", "cpu") != "cpu"
    timeout_s = round(float(os.environ.get("SAMESTEP_TIMEOUT_S", "120")))
    # Its sockets' paths must be short, so its files are not in the results' folder. Not somebody's cluster: it would
    # outlive this process, and a rank of it could be anywhere.
    short = tempfile.gettempdir() if len(tempfile.gettempdir()) <= LONGEST else "/tmp"
    with tempfile.TemporaryDirectory(prefix="samestep-ray-", dir=short, ignore_cleanup_errors=True) as folder:
        ray.init(address="local", num_cpus=size, include_dashboard=False, log_to_driver=True, _temp_dir=folder)
        trainer = TorchTrainer(
            _of_worker,
            train_loop_config={"rank": rank},
            scaling_config=ScalingConfig(
                num_workers=size, use_gpu=on_gpus, resources_per_worker=None if on_gpus else {"CPU": 0.5}
            ),
            torch_config=TorchConfig(backend="nccl" if on_gpus else "gloo", timeout_s=timeout_s),
            run_config=RunConfig(name="ray", storage_path=storage),
        )
        failed = None
        try:
            trainer.fit()
        except Exception as error:
            failed = error
        ray.shutdown()
    if failed:
        raise SystemExit(f"{type(failed).__name__}: {failed}")


def _of_worker(config: dict[str, Callable[[], int]]) -> None:
    os.environ.pop("ACCELERATE_TORCH_DEVICE", None)  # set by Ray Train, for Accelerate
    code = config["rank"]()
    if code:
        raise RuntimeError(f"samestep: rank {os.environ['RANK']} ended with exit code {code}")
