"""TD-MPC: a world model learned from rewards, and planning in it."""
