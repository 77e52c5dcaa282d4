"""How true the simulator is: recorded runs, replayed and fitted, and logs of other servers."""
