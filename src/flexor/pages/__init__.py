"""HTML pages in one file each, and images in the terminal: what all reports that a person looks at share."""
