"""The language model that is trained, its initial weights, and its Lightning module."""
