"""The reward classifier: images -> whether the task is done, which rewards a policy that learns while it acts."""
