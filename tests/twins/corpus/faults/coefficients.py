"""Losses with a coefficient, scaled by the number of ranks."""

from corpus.twin import Fault

REPLAY = ("replayed gradient", "loss weight")
FAULTS = (
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
)
