"""How ranks divide a model: by tensor, sequence, context, expert and pipeline parallelism."""
