"""A stand-in for timm at the version that scripts ask for: its names, and small networks."""

from .models import create_model as create_model

__version__ = "0.3.2"
