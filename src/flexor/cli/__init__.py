"""The command line: `main`, and a file for each verb that takes more than a few lines."""
