"""Parts of networks that several policies share."""
