"""The dashboard: pages of all studies of a folder, served on the loopback address."""
