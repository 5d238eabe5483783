"""Reads and writes LeRobot's dataset format."""
