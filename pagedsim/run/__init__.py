"""Running a study: from a configuration to runs, kept in a folder, and what is made of them."""
