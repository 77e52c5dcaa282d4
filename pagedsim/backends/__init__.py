"""What carries a run out: a simulator, an engine on this machine, or a server elsewhere."""
