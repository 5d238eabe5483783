"""A LeRobot dataset: opened, checked, decoded, and delivered as batches."""
