"""The settings of a run, and how they are read from flags, files, LeRobot's settings and Accelerate's."""
