"""Plans as text, JSON, a page and the hardware guide."""
