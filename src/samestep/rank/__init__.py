"""What every rank needs: its process group, weights, checkpoints, evaluation and step times."""
