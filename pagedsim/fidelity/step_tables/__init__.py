"""Tables of measured steps and small runs, and predictions of cost models for their rows."""
