"""ACT: action chunks from a transformer with a style variable."""
