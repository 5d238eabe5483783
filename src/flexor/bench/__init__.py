"""The measurements of `flexor bench`, each compared with the physical limit."""
