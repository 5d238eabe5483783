"""Plans as text, JSON, an HTML page and the hardware guide."""
