"""TD-MPC: a model of the task, learned from rewards, and a search in it."""
