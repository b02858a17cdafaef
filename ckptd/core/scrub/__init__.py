"""What is read again in the background, and what follows from what is found. Pure."""
