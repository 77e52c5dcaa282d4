"""Where the time goes, as ratios within one run, because machines differ."""
