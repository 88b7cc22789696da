def add_weight_decay(model, weight_decay=1e-5, skip_list=()):
    """Returns two groups of parameters: those of one dimension are not decayed."""
    groups = {True: [], False: []}
    for name, value in model.named_parameters():
        if value.requires_grad:
            groups[value.ndim > 1 and not name.endswith(".bias") and name not in skip_list].append(value)
    return [{"params": groups[False], "weight_decay": 0.0}, {"params": groups[True], "weight_decay": weight_decay}]
