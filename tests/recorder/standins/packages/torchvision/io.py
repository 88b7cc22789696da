"""Files of videos, which are not read here."""
