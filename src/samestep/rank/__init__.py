"""What every rank needs: its process group, weights, evaluation and step times."""
