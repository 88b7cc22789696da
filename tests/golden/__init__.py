"""What samestep says of every corpus, kept."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
for path in (TESTS / "twins", TESTS, TESTS.parent, TESTS.parent / "benchmarks"):  # `against` is that of the tests
    if str(path) not in sys.path:
        sys.path.append(str(path))
