"""From words, YAML and Python values to typed specifications, and from these to objects."""
