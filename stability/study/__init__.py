"""Studies: from one YAML file to paired runs and their records."""
