"""What an output folder says to anyone who looks: status, verify, diff. Writes nothing."""
