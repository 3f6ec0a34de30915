"""The one writer of a run's record, and the ways a training gets to it: its doors."""
