"""A stand-in for apex, which scripts import and do not use."""

amp = None
