"""What a job would take, before it is run: its rows, its memory, its steps."""
