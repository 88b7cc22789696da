"""What every rank needs, whatever it trains: its process group, weights, evaluation and clock."""
