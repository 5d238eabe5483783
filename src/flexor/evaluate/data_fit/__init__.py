"""Whether a dataset fits a policy: its cameras, joints, frame rate, actions and tasks beside those of the training."""
