"""Plans steps ahead and delivers batches on the device."""
