"""The version of Flexor."""

VERSION = "0.1.0"
