"""Configs: what an arm and a study are, how they are read from YAML, and how two arms differ."""
