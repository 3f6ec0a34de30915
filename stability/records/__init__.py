"""The files of a run and a study: names, paths, and how they are written and read."""
