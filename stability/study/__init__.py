"""Studies: from one YAML to paired runs and their records."""
