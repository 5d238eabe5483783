"""The robot's side of a policy that Flexor serves. Nothing here needs torch."""

__version__ = "0.1.0"
