"""Traces -> the peak of a GPU's memory."""
