"""Doors through which other libraries' trainers are recorded, a file a library."""
