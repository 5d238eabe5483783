"""`flexor ui`: runs, plans, datasets and servers in one local web application."""
