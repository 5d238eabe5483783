"""What holds a run back: figures of its last reports, rules that explain them, and changes that would help."""
