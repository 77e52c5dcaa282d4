"""All that a GPU has to tell, in one command that goes on where it was stopped."""
