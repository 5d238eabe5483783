"""Starts runs: as processes on this machine, or as jobs on a cluster or in the cloud."""
