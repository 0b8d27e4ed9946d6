"""The small language of `--where`: conditions over the columns of an output."""
