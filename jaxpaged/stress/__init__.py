"""A load test before a job goes live: requests of chosen lengths, measured on the real engine."""
