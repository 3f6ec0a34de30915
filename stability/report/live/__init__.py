"""The dashboard: pages of all studies of a folder, served to this machine alone."""
