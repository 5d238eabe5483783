"""Flexor: plan, train, resume, watch and serve robot policies."""

__version__ = "0.1.0"
