"""A stand-in for boto3, which scripts import and do not use here."""
