"""What `flexor bench` runs: measurements with the physical limit beside them."""
