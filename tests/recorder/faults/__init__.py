"""Faults of the scripts in scripts/, by what the scripts use; and the scripts that are right without them."""

from recorder.faults import by_hand, engines, kinds, libraries, plain, sharded
from recorder.faults.fault import Fault

HEALTHY = ("ddp", "accumulate", "by_hand", "accelerate_loop", "lightning_trainer", "hf_trainer", "fsdp2")
HEALTHY += ("fsdp1", "pipeline", "own_batches")
HEALTHY += (
    "tokens",
    "noisy",
    "fewer_ranks",
    "evaluates",
    "zero_optimizer",
    "compiled",
    "scaler",
    "iterable",
    "mapping",
)
HEALTHY += ("gan", "spawned", "fabric_loop", "horovod_loop", *engines.STAGES)
FAULTS = (*plain.FAULTS, *by_hand.FAULTS, *libraries.FAULTS, *sharded.FAULTS, *kinds.FAULTS, *engines.FAULTS)
__all__ = ["FAULTS", "HEALTHY", "Fault"]
