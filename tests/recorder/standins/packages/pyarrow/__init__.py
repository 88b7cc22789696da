"""A stand-in for pyarrow: parquet files are JSON, a list of row groups."""
