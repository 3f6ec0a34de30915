"""Training-stability research: paired runs, deviation, drift and their context."""

__all__ = ["__version__"]

__version__ = "0.1.0"
