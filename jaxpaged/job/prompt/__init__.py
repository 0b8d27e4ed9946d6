"""From a row's cells to the token ids that are completed, or to a row error."""
