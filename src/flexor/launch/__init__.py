"""Starting runs: processes on this machine, jobs on a cluster or in the cloud."""
