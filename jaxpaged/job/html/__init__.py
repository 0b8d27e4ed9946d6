"""The report of a run as a page to look at."""
