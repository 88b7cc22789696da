"""The doctor looks at what the engines need, without importing them."""

from samestep.world.checks.engine_packages import ENGINES, needs


def test_reads_what_the_engines_need() -> None:
    assert {"accelerate", "deepspeed", "horovod", "lightning", "ray", "transformers"} <= set(needs(ENGINES))
