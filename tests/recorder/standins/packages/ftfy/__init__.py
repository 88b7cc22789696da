"""A stand-in for ftfy: text as it is."""


def fix_text(text):
    return text
