"""Attention by name, and the dual hook that compares two of them on the same inputs."""
