"""Many servers that look like one: who gets a request, and what then goes on between them."""
