"""Triton code: a module per family of operators, with a function for each operator."""
