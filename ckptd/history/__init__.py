"""What a job's journal says: its runs, what they lost, how often to save. Pure: no clock, no file."""
