"""Steps planned ahead -> batches on the device."""
