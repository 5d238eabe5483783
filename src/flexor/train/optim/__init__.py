"""Optimizers, learning-rate schedules, the moving average."""
