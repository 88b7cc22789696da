"""A stand-in for wandb, which is imported and not used here."""
