"""Why a script is not replayed in one process: a sentence for each."""

from __future__ import annotations

OTHER_ROWS = (
    "in one process the model receives other rows than on the ranks: the script changes what its loader returns, joins "
    "it with other rows, or reads it in another order"
)
OUTSIDE = (
    "between its loader and its loss, and not in the model, the script draws random numbers by other functions than "
    "torch's (numpy, random, dropout of a batch)"
)
IN_TURN = "the script draws random numbers beside the model, which cannot be played one rank at a time"
OTHER_DRAWS = "in one process the script draws other random numbers beside the model than on the ranks"
FOR_A_BATCH = (
    "beside the model the script draws random numbers for a whole batch (shape {}), and each rank other ones: one "
    "process has one batch"
)
CALLS = (
    "at step {} the optimizer calls its closure {} times in one process, and {} times on the ranks: rounding decides "
    "where a line search ends"
)
UNFED = (
    "the script has no DataLoader, and computes its loss outside of the model, so that its targets are not known; and "
    "in one process it makes other batches by itself than on the ranks"
)
