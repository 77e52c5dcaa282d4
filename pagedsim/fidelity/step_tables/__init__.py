"""Tables of measured steps and small runs, and what a cost model says of each of their rows."""
