"""Peak GPU memory from traces."""
