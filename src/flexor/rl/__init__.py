"""Learning while acting: an actor collects transitions, a buffer keeps them, a learner updates the policy."""
