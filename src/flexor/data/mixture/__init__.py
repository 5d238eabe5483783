"""Several datasets as one, and weights of samples."""
