"""Every bound within which two numbers of a training count as one, and what each was taken from.

Nowhere else in the package stands a tolerance (tests/test_bounds.py reads the source). All are relative, of what the
name or the comment says, unless the comment gives a unit. Three kinds of origin:

- *rounding*: a multiple of what the dtype's last place, or a training that differs in its rounding alone, makes;
- *gap*: between two groups of recorded values. Healthy trainings lie far below, planted faults far above;
- *definition*: a number of another library, whose arithmetic is taken over.
"""

from __future__ import annotations

# --- samestep verify: an engine against the reference, in the proof's float64 or in float32 ---------------------------

# Rounding: times the distance of a training of the reference that is rounded differently.
TIMES_NOISE = 10
# How often rounding is drawn where two draws leave a difference near its bound.
MORE_DRAWS = 8
# Rounding: units in the last place of the tensor's largest value. A bound is never tighter.
FLOOR_ULPS = 8
# A bound above this share of a tensor's own movement says nothing about the tensor.
USELESS = 1e-3
# Rounding: of a parameter in a run's life, in float64, and in the dtypes below.
LIFE_APART, LIFE_APART_IN_LOWER = 1e-9, 1e-5
# Rounding: units in the last place by which sums over other pieces may differ after a resume.
RESUMED_APART_ULPS = 4096
# Rounding: times the root of eps. A metric may count what rounding decides.
METRIC_APART = 1e-3
# Rounding: units in the last place of the sum of a metric.
SUM_ULPS = 64
# Rounding: of the largest output of a module in the first forward passes, in float64.
FIRST_FORWARD_APART = 1e-9
# Rounding: of one element of a buffer that another rank holds, too.
BUFFER_APART = 1e-9
# Gap: of the furthest that any parameter moves. One that moves less is frozen, or has a gradient of rounding.
STANDS_STILL = 1e-9
# Gap: the same. One that moves by more, though it should be still, is no rounding.
MOVES_ALTHOUGH_STILL = 1e-6
# Rounding: of the largest element, or so many units in the last place of the gradient as it travels, and of the weights
# that it is read from. Two gradients are then one.
GRADIENT_APART, GRADIENT_APART_ULPS = 1e-6, 8
# Gap: of the greatest difference. Samples of a tensor that differ by less do not show it.
SHOWN_BY_SAMPLES = 0.01
# Gap: of a gradient. A difference that is smaller came by a lower precision on its way.
ROUNDED_ON_ITS_WAY = 1e-2
# Rounding: of a factor that is the number of ranks.
FACTOR_OF_RANKS = 1e-5
# Below this a factor is zero: the optimizer's parameters have no gradient.
NO_FACTOR = 1e-8
# Rounding: of an evaluation's sums and outputs, in float64 and below.
EVALUATION_APART, EVALUATION_APART_IN_LOWER = 1e-9, 1e-3
# Rounding: of a learning rate, whichever way a schedule computes it.
RATE_APART = 1e-6
# Rounding: of the learning rates of a hypothesis.
TRIED_RATE_APART = 1e-9
# Gap: of a difference. What a hypothesis leaves of it at first says whether it is worth to be played to its end.
HOPELESS = 0.05
# Rounding: of the first loss, computed twice on a device that adds up in any order.
LOSS_COMPUTED_AGAIN_APART = 1e-6
# Gap: of the first loss. One that changes by more depends on the order of the rows.
LOSS_BY_ORDER = 1e-6
# Gap: of an output's largest value. One that depends on other rows by more does so without padding, too.
PADDED = 1e-6
# Rounding: of the mean of rows' losses against the loss of all.
MEAN_OF_ROWS_APART, MEAN_OF_ROWS_LEAST = 1e-6, 1e-9
# The gradient's norm times the rate: below, rounding would hide what is compared, and this rate is taken instead.
HARDLY_MOVES, MOVES = 1e-5, 1e-3

# --- samestep check: ranks of a script among each other, and against one process, in float32 -------------------------

# Rounding: a gradient against the sum of what the ranks have computed. float32 gives some 1e-7.
REDUCED_APART = 1e-5
# The same, where a parameter has the dtype.
REDUCED_APART_IN = {"bfloat16": 3e-2, "float16": 4e-3}
# Gap: two factors, coefficients or weights are told apart.
TOLD_APART = 1e-3
# Gap: the quotient of two factors, each of which is known to TOLD_APART; and norms of the whole gradient of several
# steps, against the largest one.
QUOTIENTS_TOLD_APART, NORMS_TOLD_APART = 4e-3, 1e-2
# Gap: of a number that is reported of an evaluation, beside one unit of its last digit. Healthy ones have some 1e-6, a
# mean of AUROCs of 16 rows on each rank 2e-3.
REPORTED_APART = 1e-3
# Gap: of a step's largest gradient. A smaller one is rounding of zero, as of a bias before BatchNorm.
ZERO_GRADIENT = 1e-7
# Gap: the same, of a parameter that should move.
NO_GRADIENT = 1e-6
# Gap: of the whole gradient's norm on a stage.
ZERO_GRADIENT_OF_STAGE = 1e-6
# Gap: of all gradients' size. Of a smaller one of a rank's, the rounding is not its own.
ROUNDED_BY_OTHERS = 1e-2
# Gap: of a difference. What weights of the ranks that explain it leave; coarse types may leave more.
LEFT_BY_WEIGHTS, LEFT_BY_ROUNDING = 0.02, 0.2
# Gap: of the largest singular value. Below, a column is nearly a sum of others, and weights of both are arbitrary.
DEPENDENT_COLUMNS = 1e-4
# Rounding: times what a fit leaves. Weights that are nearer to each other are not told apart.
TIMES_ERROR = 10
# Gap: of a difference. What one factor that explains it leaves.
LEFT_BY_FACTOR = 0.1
# Rounding: times how near two gradients are that one process computes in another order. A factor that is fitted to one,
# and several weights that are.
TIMES_NEAR_OF_FACTOR, TIMES_NEAR_OF_WEIGHTS = 4, 10
# Gap: a weight in a sum. A smaller one is of a gradient that was not added.
LEAST_WEIGHT_ADDED = 0.1
# Gap: how far from one together, or below zero, the ranks' weights in a mean may be found.
WEIGHTS_OF_MEAN = 1e-2
# Rounding: of weights in float32 that are a mean of the ranks', relative to them.
AVERAGED_APART = 1e-6
# Gap: of the largest share of a rank in weights that ranks bring together. One that has less has none.
LEAST_SHARE = 0.01
# Gap: of how far the ranks' shares are from even. How far from those of their numbers of rows.
BY_NUMBERS_OF_ROWS = 0.1
# Gap: a gradient against one process's: of the first step, and of later ones, whose rounding a training makes grow.
FIRST_STEP_APART, LATER_STEPS_APART = 1e-4, 1e-2
# Gap: of the way of the weights. They end elsewhere than in one process.
WEIGHTS_APART = 1e-2
# Rounding: of a gradient in float32, and by how much a chaotic training makes it grow in a step.
FLOAT32_ROUNDING, ROUNDING_GROWS = 1e-7, 1000.0
# Rounding: the same, of the first step that is compared.
FIRST_ROUNDING = 1e-6
# Rounding: the mean over ranks of the losses against one process's.
LOSS_APART = 1e-5
# Rounding: the same, of a pipeline, which adds up its micro-batches in parts; and of a mean of their means.
LOSS_APART_OF_STAGES, LOSS_APART_OF_MEANS = 1e-4, 1e-3
# Rounding: the loss of ranks that compute pieces of a model, whose sums have another order.
LOSS_APART_OF_PIECES = 1e-4
# Rounding: the losses of ranks of a replica, which compute one and the same.
LOSS_APART_IN_REPLICA = 1e-6
# Absolute: of a loss that is next to nothing; of the same sum in another order; and of a mean of means.
LOSS_LEAST, LOSS_LEAST_OF_PAIR, LOSS_LEAST_OF_MEANS = 1e-7, 1e-9, 1e-6
# Rounding: sums of a module's inputs and outputs, in float32; absolute below the second.
MODULE_SUMS_APART, MODULE_SUMS_LEAST = 1e-4, 1e-12
# Rounding: a weight of a loss's term.
LOSS_WEIGHT_APART = 1e-6
# By how much coarser these bounds are, where parameters or autocast have the dtype.
COARSER = {"bfloat16": 300.0, "float16": 40.0}
# Rounding: a factor by which a gradient was clipped, of one norm; and of sums in another order.
CLIPPED_APART, CLIPPED_APART_BY_SUMS = 1e-4, 1e-2
# Gap: of the way of the trained weights. No decay is that slow.
FOLLOWS = 1e-5
# Gap: a loss that is larger, and has one value to this precision in all steps, never changes.
CONSTANT_LOSS_FROM, CONSTANT_LOSS_APART = 1e-4, 1e-6
# Rounding: of a number among the settings of two recordings.
SETTING_APART = 1e-6
# Rounding: sums of parts, and of the whole, of two recordings.
ADDED_UP_APART = 1e-6
# Gap: first gradients of parameters that have other names in two recordings.
MATCHED_APART = 1e-4
# Rounding: of a step's first gradient, between two recordings: what another order of additions makes in float32.
OTHER_ORDER_APART = 2e-6
# Rounding: the same, of the loss, while both recordings are one.
FIRST_LOSS_APART = 5e-6
# Rounding: what it may have grown to by the next step.
ROUNDING_GROWN = 1e-3
# Gap: a parameter's gradient against its own norm, where that is no such part of the whole.
OF_ITS_OWN_NORM, PART_OF_WHOLE = 1e-2, 1e-5
# Rounding: of a weight in float32, in one step.
LAST_BIT = 3e-7
# Gap: of a step's largest element. What is below is rounding, which Adam makes as large as any other.
MADE_LARGE_BY_ADAM = 1e-5
# Gap: rows that are computed of a batch, at the first step and later.
COMPUTED_ROWS_APART_FIRST, COMPUTED_ROWS_APART_LATER = 1e-4, 1e-2
# Gap: of the first gradient's root mean square. Smaller elements are rounding, which Adam makes full steps of.
LEAST_OF_FIRST_GRADIENT = 1e-4
# Gap: a scale and a shift that are fitted to rows.
FITTED_ROWS_APART, FITTED_SCALE_APART, FITTED_SHIFT_APART = 1e-4, 1e-3, 1e-6
# Rounding: of a row's floating-point numbers, relative to their magnitude.
ROW_APART = 1e-6
# Gap: of all rows that were read. Fewer that are alike may be so by chance.
ROWS_ALIKE_BY_CHANCE = 1 / 20

# --- A model that is divided, tried against the whole one ------------------------------------------------------------

# Gap: of the largest value. What is not divided rightly is off by as much as it is large.
DIVIDED_APART = 1e-3
# The same, where only the rows or the layers are divided, and no sum within a layer.
DIVIDED_ROWS_APART = 1e-4
# Gap: of the largest gradient. Smaller ones are rounding.
DIVIDED_GRADIENT = 1e-6
# The same, where rows are exchanged between experts.
EXCHANGED_GRADIENT, EXCHANGED_ULPS = 1e-5, 16

# --- Definitions -----------------------------------------------------------------------------------------------------

# What torch.nn.utils.clip_grad_norm_ adds to the norm before it divides.
CLIP_EPS = 1e-6
# The smallest normal number of float32. Below, digits are lost.
SMALLEST_FLOAT32 = 1.2e-38
# Above zero: what a division needs.
ABOVE_ZERO = 1e-300
# The same in float32.
ABOVE_ZERO_FLOAT32 = 1e-30
