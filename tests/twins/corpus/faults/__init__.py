"""The faults of the twins, by what they are about."""

from corpus.faults import by_hand, coefficients, control, data, layouts, local_sgd, losses, pipelines, schedules, state

FAULTS = (
    *data.FAULTS,
    *losses.FAULTS,
    *coefficients.FAULTS,
    *schedules.FAULTS,
    *state.FAULTS,
    *control.FAULTS,
    *layouts.FAULTS,
    *pipelines.FAULTS,
    *by_hand.FAULTS,
    *local_sgd.FAULTS,
)
