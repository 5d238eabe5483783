"""`flexor serve`: a trained policy for robots on the network, in openpi's protocol."""
