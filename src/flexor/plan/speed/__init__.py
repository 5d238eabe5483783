"""Step times from traces, and the measurements they are based on."""
