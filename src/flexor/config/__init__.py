"""The settings of a run: what there are, and how they are read from flags, files and other programs' settings."""
