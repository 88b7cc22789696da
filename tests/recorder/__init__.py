"""The recorder on scripts of several kinds, healthy and with planted faults."""
