"""Open loop: predicted against recorded actions, without a robot, and what the policy looks at."""
