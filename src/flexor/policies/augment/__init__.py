"""Image augmentation in training: a random choice of transforms for each sample and camera, on the device."""
