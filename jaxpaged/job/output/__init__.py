"""The output of a job: whose the folder is, what is finished in it, and how parts get there."""
