"""LeRobot's format, read and written."""
