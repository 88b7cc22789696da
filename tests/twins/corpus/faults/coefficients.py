"""Losses with a coefficient, scaled by the number of ranks."""

from corpus.twin import Fault

REPLAY = ("replayed gradient", "loss weight")
FAULTS = (
    Fault(
        "vicreg",
        "gathered_gradient_incomplete",
        "        dist.all_reduce(gradient)\n",
        "",
        "dist.all_gather(gathered, rows)",
        ("replayed gradient",),
        "gathered",
        "each rank's rows have the gradient of its own loss alone",
        arguments="--norm --dropout 0.2",
    ),
    Fault(
        "byol",
        "loss_times_ranks",
        "F.cosine_similarity(online(first), projected).mean()",
        "F.cosine_similarity(online(first), projected).mean() * world",
        "loss = args.coefficient - args.coefficient * F.cosine_similarity(online(first), projected).mean() * world",
        REPLAY,
        "times|multiplied",
        "the steps are twice as large",
    ),
    Fault(
        "own_checkpoints",
        "loss_divided_by_ranks",
        "loss = args.weight * F.mse_loss(model(inputs), targets)",
        "loss = args.weight * F.mse_loss(model(inputs), targets) / world",
        "loss = args.weight * F.mse_loss(model(inputs), targets) / world",
        REPLAY,
        "twice|divided",
        "the steps are half as large",
    ),
    Fault(
        "gradient_edits",
        "gradient_changed_after_backward",
        "p.grad.clamp(-0.05, 0.05)",
        "p.grad.clamp(-0.1 / world, 0.1 / world)",
        "return p.grad.clamp(-0.1 / world, 0.1 / world)",
        ("replayed gradient",),
        "own code",
        "the elements of the gradient are clamped to another limit on each number of ranks",
    ),
    Fault(
        "gradient_edits",
        "gradient_changed_after_backward",
        "return p.grad + 0.01 * p",
        "return p.grad + 0.01 * world * p",
        "return p.grad + 0.01 * world * p",
        ("replayed gradient",),
        "own code",
        "the weights decay faster on more ranks",
        arguments="--edit decay",
    ),
)
