"""SAC: a Gaussian actor that learns from rewards while it acts, with demonstrations and a person's help."""
