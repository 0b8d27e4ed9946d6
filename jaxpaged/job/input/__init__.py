"""The input of a job: which files, which rows, and whether they are still the same."""
